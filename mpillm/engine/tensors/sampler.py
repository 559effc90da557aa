"""Choose tokens from logits.

A sampled token depends on its logits, the request's parameters and seed, and its place in the answer.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mpillm.engine.schedule.sampling_params import SamplingParams
from mpillm.engine.tensors.staging import to_device

_GROUP = 1024
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def likeliest(logits: Tensor) -> Tensor:
    """Return each row's likeliest token, the first of equally likely tokens: int64 [n] for logits [n, vocab].

    On a CPU, this finds the maximum of each group, then the place in the first group with the maximum.
    PyTorch's argmax over the vocabulary takes 3.5 times as long, and more in bfloat16.
    """
    n_groups, left = divmod(logits.shape[-1], _GROUP)
    if logits.device.type != "cpu" or not n_groups:
        return logits.argmax(-1)
    n_grouped = n_groups * _GROUP
    best = logits[:, :n_grouped].view(len(logits), n_groups, _GROUP).amax(-1)
    if left:
        best = torch.cat([best, logits[:, n_grouped:].amax(-1, keepdim=True)], dim=1)
    ids = (best.argmax(-1, keepdim=True) * _GROUP + torch.arange(_GROUP)).clamp_(max=n_grouped + left - 1)
    tokens: Tensor = ids.gather(1, logits.gather(1, ids).argmax(-1, keepdim=True))[:, 0]
    return tokens


def sample(logits: Tensor, params: list[SamplingParams], places: list[int]) -> Tensor:
    """Return a token for each row of `logits` [n, vocab] (float32): int64, on their device.

    `places`: number of tokens that each answer has so far.
    """
    tokens = likeliest(logits)
    for restricted in (False, True):
        chosen = [i for i, p in enumerate(params) if not p.is_greedy and p.is_restricted == restricted]
        if chosen:
            rows, index = [params[i] for i in chosen], to_device(chosen, logits.device)
            temperatures = np.array([[p.temperature] for p in rows], np.float32)
            scaled = logits.index_select(0, index).div_(to_device(temperatures, logits.device))
            numbers = _uniform(np.array([p.seed for p in rows]), np.array([places[i] for i in chosen]))
            uniform = to_device(numbers, logits.device)
            if restricted:
                tokens[index] = _sample_restricted(scaled, rows, uniform)
            else:
                tokens[index] = _invert(scaled.softmax(-1), uniform)
    return tokens


def _sample_restricted(scaled: Tensor, params: list[SamplingParams], uniform: Tensor) -> Tensor:
    vocab, device = scaled.shape[-1], scaled.device
    top_k = np.array([[min(p.top_k, vocab) or vocab] for p in params])
    top_p = to_device(np.array([[p.top_p] for p in params], np.float32), device)
    # topk sorts its result. Only top-p without top-k sorts the whole vocabulary.
    values, ids = scaled.topk(int(top_k.max()), dim=-1)
    places = torch.arange(values.shape[-1], device=device)
    probabilities = values.masked_fill_(places >= to_device(top_k, device), -torch.inf).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    probabilities.masked_fill_((before >= top_p) & (places > 0), 0)
    return ids.gather(-1, _invert(probabilities, uniform)[:, None])[:, 0]


def _invert(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Return the first index at which the running sum passes uniform * total.

    int64 [n] for probabilities [n, m], uniform [n] (float64). Search the group first, then the place in the
    group: a running sum of a whole vocabulary takes a GPU longer than a step of a small model.
    """
    n, m = probabilities.shape
    groups = F.pad(probabilities, (0, -m % _GROUP)).view(n, -1, _GROUP)
    sums = groups.sum(-1, dtype=torch.float64)
    running = sums.cumsum(-1)
    threshold = uniform[:, None] * running[:, -1:]
    group = torch.searchsorted(running, threshold, right=True).clamp_(max=groups.shape[1] - 1)
    inside = groups.gather(1, group[:, :, None].expand(-1, -1, _GROUP))[:, 0].cumsum(-1, dtype=torch.float64)
    # Rounding may make the difference reach the group's sum, behind its last possible token.
    last = inside[:, -1:]
    left = (threshold - (running - sums).gather(1, group)).minimum(last.nextafter(torch.zeros_like(last)))
    place = torch.searchsorted(inside, left, right=True)
    return (group * _GROUP + place)[:, 0].clamp_(max=m - 1)


def _uniform(seeds: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return uniform numbers in [0, 1) from (seed, place): two rounds of splitmix64 (Steele et al., 2014)."""
    x = seeds.astype(np.uint64)
    for y in (np.uint64(0), places.astype(np.uint64)):
        x = (x ^ y) + _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)) / float(1 << 53)
