"""How a command finds its values: layers in order, files of the user's own, flags, and the configurations of backends."""
