"""A rank's weights: read from checkpoints and engines, quantised, or made up."""
