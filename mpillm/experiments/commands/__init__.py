"""The commands that start or compare several runs, each a file with `main(argv)`, as in `mpillm.commands`."""
