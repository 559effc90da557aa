"""The memory of the paged KV cache."""
