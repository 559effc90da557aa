"""Commands for a submission, each a file with `main(argv)`, as in `mpillm.commands`."""
