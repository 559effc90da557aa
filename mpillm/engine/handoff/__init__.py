"""How KV caches move from one instance to another: their pieces, over MPI, NCCL or the memory of peers."""
