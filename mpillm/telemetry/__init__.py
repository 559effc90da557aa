"""Telemetry of a rank: its log, spans of work, samples of its CPU and GPU, free memory."""
