"""Models for tritonserver's Python backend: the embedded engine, and text processing around it."""
