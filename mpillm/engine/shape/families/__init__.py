"""The model families that the torch core computes, a file each."""
