"""mpillm: MLPerf Inference LLM benchmarks on a cluster, from one mpirun."""

__version__ = "0.1.0"
