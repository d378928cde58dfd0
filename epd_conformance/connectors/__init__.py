"""EC connectors: the reference one, and the recording wrappers with their journal."""
