"""The live layer: real servers in a topology, the requests that are sent to them, and the cells that are judged."""
