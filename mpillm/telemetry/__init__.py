"""What a rank notes of itself while it runs: spans of work, samples of its CPU and GPU, free memory."""
