"""Small parts that work on any tensor: staging, sampling, rounding, CUDA graphs."""
