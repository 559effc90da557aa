"""A model's computation: layers, attention, heads that draft tokens."""
