"""Calibrate an fp8 KV cache: compute its scales from the keys and values of some prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mpillm.engine.model.attention import StepAttention
from mpillm.engine.model.model_part import ModelPart
from mpillm.engine.parallel.groups import Groups
from mpillm.engine.schedule.step import Span
from mpillm.engine.shape.engine_config import EngineConfig, SchedulerConfig
from mpillm.engine.shape.entries import kv_scale_names
from mpillm.engine.shape.model_info import check_model
from mpillm.engine.tensors.rounding import LARGEST

# Headroom for keys and values larger than in calibration, which would be clipped. A larger scale does not
# reduce the precision of a float.
_MARGIN = 2.0
_TOKENS_PER_BLOCK = 32


class _LargestRecorder(StepAttention):
    """Records the largest key and value of each layer in `largest` [layers, 2]."""

    largest: Tensor

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        out = super().__call__(layer, qkv)  # rotates the keys in place
        h, k = self._n_heads, self._n_kv_heads
        for i, values in enumerate((qkv[:, h : h + k], qkv[:, h + k :])):
            self.largest[layer, i] = torch.maximum(self.largest[layer, i], values.abs().max())
        return out


def kv_scales(
    folder: Path, prompts: list[list[int]], n_threads: int, progress: Callable[[str], object] | None = None
) -> dict[str, Tensor]:
    """Return a scale for the keys and a scale for the values of each layer of the model in `folder`.

    Each scale is float32 [1], under a name of `kv_scale_names`. The model runs on the CPU, one prompt at a
    time. Raises ConfigError as `check_model` does, for example if the model does not fit in memory.
    """
    longest = max(map(len, prompts))
    config = EngineConfig(
        SchedulerConfig(max_num_tokens=longest, tokens_per_block=_TOKENS_PER_BLOCK),
        model_path=str(folder),
        n_threads=n_threads,
        max_seq_len=longest,
        kv_cache_tokens=-(-longest // _TOKENS_PER_BLOCK) * _TOKENS_PER_BLOCK,
    )
    info = check_model(config)
    torch.set_num_threads(n_threads)
    part = ModelPart.load(config, info, Groups())
    model, blocks = part.model, list(range(1, 1 + -(-longest // _TOKENS_PER_BLOCK)))
    largest = torch.zeros(info.config.n_layers, 2)
    with torch.inference_mode():
        for i, prompt in enumerate(prompts):
            attention = _LargestRecorder(
                [Span(0, 0, len(prompt))],
                {0: blocks},
                part.cache,
                part.n_heads,
                model.rotations,
                part.dtype,
                kinds=model.kinds,
            )
            attention.largest = largest
            model.forward(
                model.embed(torch.tensor(prompt), attention.positions),
                attention,
                torch.tensor([len(prompt) - 1]),
            )
            if progress is not None and (i + 1) % 16 == 0:
                progress(f"calibrating the KV cache: {i + 1} of {len(prompts)} prompts")
    scales = torch.where(largest == 0, 1.0, largest * (_MARGIN / LARGEST))
    return {
        name: scale.reshape(1)
        for layer in range(info.config.n_layers)
        for name, scale in zip(kv_scale_names(layer), scales[layer], strict=True)
    }
