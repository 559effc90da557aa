"""What tests of guesses share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

N_OUTPUT = 48
NGRAM = {"decoding_type": "NGram", "max_draft_len": 4, "max_matching_ngram_size": 2}


def draft_target(folder: Path, max_draft_len: int = 3) -> dict[str, Any]:
    """Return how to guess with the model of `folder`."""
    return {
        "decoding_type": "Draft_Target",
        "max_draft_len": max_draft_len,
        "speculative_model": str(folder),
    }


def save_half(folder: Path, path: Path) -> None:
    """Save the model of `folder` with the first half of its layers."""
    config = json.loads((folder / "config.json").read_text())
    n_layers = config["num_hidden_layers"]
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": n_layers // 2}))
    gone = tuple(f"model.layers.{i}." for i in range(n_layers // 2, n_layers))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: x for name, x in tensors.items() if not name.startswith(gone)}
    save_file(kept, path / "model.safetensors")
