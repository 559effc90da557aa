"""Triton kernels for NVIDIA GPUs, C kernels for CPUs; `ops`, `linear` and `model.attention` use PyTorch."""
