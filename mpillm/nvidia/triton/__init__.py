"""Model repositories for tritonserver (`repository`), and what `run-llm-server` starts of it (`servers`)."""
