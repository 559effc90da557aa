"""NVIDIA's commands, each a file with `main(argv)`, like in `mpillm.commands`."""
