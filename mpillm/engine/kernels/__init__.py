"""Triton kernels for NVIDIA GPUs and C for CPUs; `model.ops` and `model.attention` have the plain forms."""
