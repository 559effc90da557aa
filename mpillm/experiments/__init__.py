"""Several runs: compared, in turns, over a grid, and in search of the best rate."""
