"""A model and its computation: configuration, layers, attention, matrix products."""
