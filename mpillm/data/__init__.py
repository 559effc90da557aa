"""The samples of a test: data sets, the published formats, tokenizers. Knows nothing of ranks."""
