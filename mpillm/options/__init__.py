"""Options: their declarations (`fields/`), and how a command determines their values."""
