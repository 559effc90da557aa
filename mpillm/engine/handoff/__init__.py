"""KV cache transfer between instances: pieces, over MPI, NCCL or the memory of peers."""
