"""Commands that start or compare several runs, each a file with `main(argv)`, like in `mpillm.commands`."""
