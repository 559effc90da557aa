"""Roles of ranks: harness, leader, instances, and the handoff between instances."""
