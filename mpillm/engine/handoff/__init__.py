"""KV cache transfer between instances, in pieces: over MPI, NCCL or GPU peer memory."""
