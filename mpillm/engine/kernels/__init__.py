"""Triton kernels for NVIDIA GPUs; `model.ops` and `model.attention` have the plain forms."""
