"""The engine without servers: an EC connector's objects, called in process as vLLM calls them.

Pure (no vLLM, no torch): `content`, `plan`, `findings`, `judge`. With vLLM: `configs`, `requests`, `sides`, `worker`, `core`,
`real_core`, `server`, `machine`. Processes: `host` and `hosted` keep a connector that hangs or crashes away from the caller.
`docs/engine.md` says how the parts belong together.
"""
