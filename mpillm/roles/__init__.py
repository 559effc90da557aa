"""What a rank does: harness, leader, instances, and the handoff between them."""
