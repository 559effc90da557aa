"""Servers that a run may start and own: one record for each kind, in a file of its own."""
