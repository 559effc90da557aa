"""What a rank notes of itself while it runs: spans of work, and samples of its CPU and GPU."""
