"""Cores that run TensorRT-LLM inside the ranks: `executor` and `hlapi`, over `library`."""
