"""The stages from a model to an engine (docs/howto/pipeline.md): `operation` runs them."""
