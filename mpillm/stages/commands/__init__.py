"""The commands of this package, one file for each."""
