"""Optional features of requests: beams, LoRA adapters, penalties, returned logits, forbidden words."""
