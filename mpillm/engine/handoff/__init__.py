"""Handoffs on the engine's side: which KV caches leave and arrive, and how their pieces move."""
