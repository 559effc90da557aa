"""The commands of this package, a file for each."""
