"""Checks of machines and clusters before a run, on all ranks: `mpillm doctor`."""
