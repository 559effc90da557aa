"""`bench table`: whole runs beside the figures that NVIDIA publishes for one H200."""
