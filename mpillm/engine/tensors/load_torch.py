"""Imports PyTorch for the engine."""

from __future__ import annotations

import os

# Ranks, clients and servers share a node's cores: by default a thread that waits for one that has no core
# would spin for as long as the scheduler lets it. But a step has hundreds of short parallel sections, and to
# wake a sleeper for each takes longer than many of them: half of a small model's speed on idle cores. So a
# thread spins for some ten microseconds, then it sleeps. Only libgomp, PyTorch's own on Linux, counts turns.
_WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}


def load_torch() -> None:
    """Import PyTorch; its threads soon sleep while they wait for each other, unless the user says otherwise.

    OpenMP reads the variables as it is loaded, and programs that this process starts (another engine, to
    compare with) find them as they were.
    """
    added = {} if any(name in os.environ for name in _WAITING) else _WAITING
    os.environ.update(added)
    try:
        import torch  # noqa: F401
    finally:
        for name in added:
            del os.environ[name]
