"""What a rank records of itself: its log, spans of work, samples of its CPU and GPU, free memory."""
