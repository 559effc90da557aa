"""Programs for developers of mpillm; they are not installed."""
