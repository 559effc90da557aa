"""A run on one rank: joining, planning, the phases, the end."""
