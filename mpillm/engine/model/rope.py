"""Rotary embeddings: by how much each position turns each pair of a head's values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mpillm.engine.shape.model_config import ModelConfig, RopeScaling


def rotations(config: ModelConfig, max_seq_len: int) -> Tensor:
    """Return exp(i * position * frequency): complex64 [max_seq_len, head_dim / 2].

    If layers with a window have their own base, their rotations follow: [2 * max_seq_len, head_dim / 2].
    """
    if config.family.embedding.has_positions:
        return torch.ones(max_seq_len, config.head_dim // 2, dtype=torch.complex64)
    if (latent := config.latent) is not None:  # its first values are not turned
        turns = _of_rope(config.rope_theta, config.rope_scaling, latent.qk_rope_head_dim, max_seq_len)
        return torch.cat([torch.ones(max_seq_len, latent.kv_lora_rank // 2) + 0j, turns], dim=1)
    plain = _of_rope(config.rope_theta, config.rope_scaling, config.head_dim, max_seq_len)
    if config.local_rope_theta is None:
        return plain
    return torch.cat([plain, _of_rope(config.local_rope_theta, RopeScaling(), config.head_dim, max_seq_len)])


def _of_rope(theta: float, scaling: RopeScaling, head_dim: int, n: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    frequencies = _scaled(1.0 / theta**exponents, scaling, theta)
    angles = torch.outer(torch.arange(n).float(), frequencies)
    return torch.polar(torch.full_like(angles, scaling.attention_factor), angles)


def _scaled(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    if scaling.kind == "llama3":
        # Low frequencies are divided by the factor, high frequencies kept, those in between blended.
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        keep = (
            (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        ).clamp(0, 1)
        return frequencies * (keep + (1 - keep) / scaling.factor)
    if scaling.kind == "yarn":
        # As llama3, but the blend is linear in the pair's index (Peng et al., YaRN, 2023).
        n, length = len(frequencies), scaling.original_max_position_embeddings

        def pair(turns: float) -> float:
            """Return which pair, from 0 to n, makes so many turns over the original length."""
            return n * math.log(length / (turns * 2 * math.pi)) / math.log(theta)

        low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * n - 1)
        blend = (torch.arange(n).float() - low) / (high - low if high != low else 0.001)
        keep = 1 - blend.clamp(0, 1)
        return frequencies / scaling.factor * (1 - keep) + frequencies * keep
    return frequencies / scaling.factor
