"""Baseline of transformers: `generate` with static batches, and `generate_batch` (continuous batching)."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError

_PAGE = 32  # tokens of a page of the continuous cache: faster here than the default 256
_MAX_BATCH_TOKENS = 2048  # per step of continuous batching


class TransformersBaseline:
    """A model that generates greedily, with answers of one length."""

    def __init__(self, folder: Path, dtype: str) -> None:
        """`dtype`: a torch dtype's name. Raises ConfigError if torch or transformers is missing."""
        try:
            self._torch: Any = importlib.import_module("torch")
            self._transformers: Any = importlib.import_module("transformers")
        except ImportError as error:
            raise ConfigError(
                f"benchmarks engine needs the package '{error.name}': pip install 'mpillm[test]'"
            ) from error
        self._transformers.utils.logging.set_verbosity_error()
        self._transformers.utils.logging.disable_progress_bar()
        self._model = self._transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(self._torch, dtype)
        ).eval()

    def static(self, prompts: list[list[int]], n_output: int, batch: int) -> list[list[int]]:
        """Answer in static batches, padded on the left, with prompts of similar length: the best case."""
        torch = self._torch
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        answers: dict[int, list[int]] = {}
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            longest = max(len(prompts[i]) for i in chosen)
            tokens = torch.tensor([[0] * (longest - len(prompts[i])) + prompts[i] for i in chosen])
            mask = torch.tensor([[0] * (longest - len(prompts[i])) + [1] * len(prompts[i]) for i in chosen])
            with torch.inference_mode():
                out = self._model.generate(
                    tokens,
                    attention_mask=mask,
                    do_sample=False,
                    max_new_tokens=n_output,
                    min_new_tokens=n_output,
                    pad_token_id=0,
                )
            answers |= dict(zip(chosen, out[:, longest:].tolist(), strict=True))
        return [answers[i] for i in range(len(prompts))]

    def continuous(self, prompts: list[list[int]], n_output: int) -> list[list[int]]:
        """Answer all prompts with continuous batching. The cache has the needed size; the default is slow."""
        pages = sum(-(-(len(prompt) + n_output) // _PAGE) for prompt in prompts)
        out = self._model.generate_batch(
            prompts,
            generation_config=self._transformers.GenerationConfig(
                max_new_tokens=n_output, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=self._transformers.ContinuousBatchingConfig(
                page_size=_PAGE,
                num_blocks=pages + len(prompts),
                max_batch_tokens=_MAX_BATCH_TOKENS,
                allow_block_sharing=False,
            ),
            persistent_manager=True,
            warmup=False,
        )
        return [
            out[f"req_{number}"].generated_tokens
            for number in sorted(int(name.removeprefix("req_")) for name in out)
        ]
