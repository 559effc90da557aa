"""Import PyTorch with settings for the engine."""

from __future__ import annotations

import os

# Ranks, clients and servers share a node's CPU cores. By default, a thread spins until the thread that it
# waits for gets a core. If a thread slept immediately, a small model would run at half the speed on idle
# cores: a step has hundreds of short parallel sections, and waking a thread takes longer than many of them.
# So a thread spins for about ten microseconds, then sleeps. Only libgomp, PyTorch's OpenMP on Linux, reads
# GOMP_SPINCOUNT.
_WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}


def load_torch() -> None:
    """Import PyTorch; its threads soon sleep when they wait, unless the user sets one of the variables.

    OpenMP reads the variables when it is loaded. Afterwards they are removed, so that child processes
    (another engine to compare with) have the user's environment.
    """
    added = {} if any(name in os.environ for name in _WAITING) else _WAITING
    os.environ.update(added)
    try:
        import torch  # noqa: F401
    finally:
        for name in added:
            del os.environ[name]
