"""The orchestrator of encoder disaggregation: one OpenAI-compatible address in front of all the servers."""
