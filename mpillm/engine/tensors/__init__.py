"""Utilities for tensors: staging, sampling, rounding, CUDA graphs."""
