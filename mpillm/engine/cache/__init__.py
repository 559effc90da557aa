"""The paged KV cache, and the reuse of blocks with a common prefix."""
