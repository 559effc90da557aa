"""How a command finds its values: layers, the user's files, flags, and the configurations of backends."""
