"""Triton kernels for NVIDIA GPUs and C for CPUs; `ops`, `linear` and `model.attention` are plain."""
