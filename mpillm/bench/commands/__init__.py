"""The wing's command."""
