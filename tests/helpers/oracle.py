"""transformers, which says what an engine must answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

Tokens = list[list[int]]


class Oracle:
    """A folder's model in transformers, in float32. A token ends an answer only if a call names it."""

    def __init__(self, folder: Path) -> None:
        transformers = pytest.importorskip("transformers")
        # small products: a second thread costs more than it gives, above all on a busy machine
        torch.set_num_threads(1)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None

    def tokens(self, prompt: list[int], max_output: int, **options: Any) -> list[int]:
        """Return the greedy answer, the end token included."""
        tokens: list[int] = self._generate(prompt, max_output, **options)[0, len(prompt) :].tolist()
        return tokens

    def logits(self, tokens: list[int]) -> Tensor:
        """Return the logits behind each token: [len(tokens), vocab]."""
        with torch.inference_mode():
            logits: Tensor = self.model(torch.tensor([tokens])).logits[0]
        return logits

    def logprobs(self, prompt: list[int], answer: list[int]) -> Tensor:
        """Return the log probabilities of the vocabulary at each place of an answer: [len(answer), vocab]."""
        return self.logits(prompt + answer)[len(prompt) - 1 : -1].log_softmax(-1)

    def beams(
        self, prompt: list[int], max_output: int, width: int, ends: tuple[int, ...] = (), **options: Any
    ) -> list[tuple[list[int], float]]:
        """Return the tokens of each beam, the end token included, and its score."""
        out = self._generate(
            prompt,
            max_output,
            num_beams=width,
            num_return_sequences=width,
            eos_token_id=list(ends) or None,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
        beams = []
        for row, score in zip(
            out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True
        ):
            lengths = [i + 1 for i, token in enumerate(row) if token in ends]
            beams.append((row[: lengths[0]] if lengths else row, score))
        return beams

    def _generate(self, prompt: list[int], max_output: int, **options: Any) -> Any:
        ids = torch.tensor([prompt])
        fixed = {"do_sample": False, "max_new_tokens": max_output, "pad_token_id": 0}
        with torch.inference_mode():
            return self.model.generate(ids, attention_mask=torch.ones_like(ids), **fixed, **options)


def expected_tokens(folder: Path, prompts: Tokens, max_output: int, **options: Any) -> Tokens:
    """Return the greedy answers of transformers, computed one prompt at a time."""
    oracle = Oracle(folder)
    return [oracle.tokens(prompt, max_output, **options) for prompt in prompts]
