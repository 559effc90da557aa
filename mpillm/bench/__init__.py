"""Benchmarks: medians and ratios against a baseline of the same minute, printed as tables."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from disagg.errors import ConfigError, nearest

_BENCHES = {
    "routing": "what everything around the model costs, with dummy cores",
    "engine": "the embedded engine: against transformers on a CPU, against the memory's floor on a GPU",
    "load": "loading weights from an engine's files against loading them from a checkpoint",
    "agreement": "answers and logits of tensor parallel instances against those of one rank",
    "dataset": "loading a preprocessed data set: seconds and memory",
    "handoff": "KV caches between two ranks, against plain messages of the same size",
}


def main(argv: Sequence[str]) -> int:
    """``python -m mpillm bench NAME``"""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m mpillm bench NAME [options]\n")
        for name, description in _BENCHES.items():
            print(f"  {name:<9} {description}")
        return 0
    if argv[0] not in _BENCHES:
        raise ConfigError(f"no benchmark '{argv[0]}'{nearest(argv[0], _BENCHES)}; there are: {', '.join(_BENCHES)}")
    return int(importlib.import_module(f"mpillm.bench.{argv[0]}").main(list(argv[1:])))
