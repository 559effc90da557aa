"""Options: their declarations (`fields/`), and how a command finds their values."""
