"""Several runs: compared, alternating, over a grid, and in search of the best rate."""
