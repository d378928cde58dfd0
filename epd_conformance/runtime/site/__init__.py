"""The directory that goes on the PYTHONPATH of every server, so that repairs reach all of its processes."""
