"""NVIDIA's commands, each a file with `main(argv)`, as in `mpillm.commands`."""
