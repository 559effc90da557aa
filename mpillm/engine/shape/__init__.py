"""What a model is, without PyTorch: families, configurations, layout over ranks, files, memory."""
