"""Messages and collectives between the ranks of an instance during a step."""
