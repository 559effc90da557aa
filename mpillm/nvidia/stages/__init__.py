"""The stages before a run, as NVIDIA's Makefile has them: from a model to an engine, and servers.

What they share (`operation` runs them, `servers` starts and watches), and those of mpillm's own engine
(`torch_engine`, `torch_servers`); TensorRT-LLM's and Triton's stand in their rooms.
"""
