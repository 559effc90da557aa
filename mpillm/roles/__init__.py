"""What a rank does: harness, leader, instances, and the handoff between them. Imports `comms` and `cores.base`."""
