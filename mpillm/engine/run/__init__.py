"""Computation of steps on a rank: the worker, on CPUs and on GPUs."""
