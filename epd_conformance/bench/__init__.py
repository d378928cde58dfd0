"""Benchmarks: speed as ratios within one run, everything that is compared measured alternately; never a timed test."""
