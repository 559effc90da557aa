"""The embedded engine: requests in, tokens out."""
