"""Plans: JSON documents that fix everything a cell does (requests, order, faults, seeds), and the media they name."""
