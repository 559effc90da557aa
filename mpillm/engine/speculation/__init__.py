"""Speculative decoding: guess an answer's next tokens, and test all guesses in one step of the model."""
