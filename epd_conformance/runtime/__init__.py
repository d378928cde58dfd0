"""What the machine must offer: vLLM, the repairs its CPU build needs, and the doctor that checks it all."""
