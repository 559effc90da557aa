"""Descriptions of models, without PyTorch: families, configurations, layout over ranks, files, memory."""
