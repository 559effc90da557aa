"""TensorRT-LLM inside the ranks of a run."""
