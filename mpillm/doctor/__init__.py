"""What can be wrong with a machine or a cluster before a run, found out on all ranks: `mpillm doctor`."""
