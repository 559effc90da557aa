"""Weights on disk: checkpoints, engines, quantisation, and whether they fit the memory."""
