"""The samples of a test: data sets, the published formats, tokenizers. Independent of ranks."""
