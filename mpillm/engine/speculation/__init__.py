"""Speculative decoding: draft an answer's next tokens, and verify all drafts in one step of the model."""
