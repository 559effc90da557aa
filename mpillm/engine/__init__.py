"""The embedded engine: turns requests into tokens. Rooms: model, kernels, cache, parallel, handoff, weights."""
