"""Clients of other people that make a run's load in LoadGen's place: a record for each, in its own file."""
