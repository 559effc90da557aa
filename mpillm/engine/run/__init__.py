"""How a rank computes a step: the worker, on CPUs and on GPUs."""
