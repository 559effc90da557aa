"""A rank's weights: read from checkpoints and engines, quantized, or random."""
