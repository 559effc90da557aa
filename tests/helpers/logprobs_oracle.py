"""Log probabilities by transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor


def expected_logprobs(folder: Path, prompt: list[int], answer: list[int]) -> Tensor:
    """Return those of the whole vocabulary at each place of an answer, in float32: [len(answer), vocab]."""
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([prompt + answer])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)
