"""Models that tritonserver's Python backend runs: the embedded engine, and text before and after it."""
