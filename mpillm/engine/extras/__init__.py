"""What few requests ask for: beams, LoRA adapters, penalties, kept logits."""
