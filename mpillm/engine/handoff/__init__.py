"""This rank's part of a handoff: moves pieces of KV caches from memory to memory."""
