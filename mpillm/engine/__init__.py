"""The embedded engine: requests in, tokens out. Rooms: model, kernels, cache, parallel, handoff, weights."""
