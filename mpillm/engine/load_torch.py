"""Imports PyTorch for the engine."""

from __future__ import annotations

import os

_POLICY = "OMP_WAIT_POLICY"


def load_torch() -> None:
    """Import PyTorch; its threads sleep while they wait for each other, unless the user says otherwise.

    Ranks, clients and servers share a node's cores. A thread that waits for one that has no core gives its
    own away; it does not spin while the scheduler lets it. OpenMP reads the variable as it is loaded, and
    programs that this process starts (another engine, to compare with) find it as it was.
    """
    stated = _POLICY in os.environ
    os.environ.setdefault(_POLICY, "passive")
    try:
        import torch  # noqa: F401
    finally:
        if not stated:
            del os.environ[_POLICY]
