"""`bench core-model`: load on the engine's model behind Triton, and its report."""
