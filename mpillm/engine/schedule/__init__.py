"""Which tokens each step computes, without PyTorch: sequences, blocks of cache, the scheduler, messages."""
