"""Programs for those who work on mpillm. They are not installed."""
