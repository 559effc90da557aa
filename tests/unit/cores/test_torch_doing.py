"""What the torch core reports while it loads: no number that does not move before the first weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mpillm.cores.torch_core import TorchCore
from mpillm.engine.weights import bytes_held


def test_before_the_first_weights_no_bytes_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    core: Any = object.__new__(TorchCore)
    core._runs, core.info = None, SimpleNamespace(n_bytes=540_000_000)
    monkeypatch.setattr(bytes_held, "_n_bytes", 0)
    assert core.doing() == "starts the engine, no weights are read yet"
    bytes_held.note(113_000_000)
    assert core.doing() == "0.11 of 0.54 GB of weights"
