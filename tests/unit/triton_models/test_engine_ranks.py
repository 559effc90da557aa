"""The ranks of an engine behind Triton, as far as that goes without a tritonserver."""

from __future__ import annotations

import sys

import pytest

from disagg.errors import ConfigError
from mpillm.config.core_config import CoreConfig
from mpillm.triton_models import engine_ranks


def test_mpich_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_ranks, "mpi_library", lambda: "MPICH Version:      5.0.2")
    monkeypatch.setenv("MPI4PY_LIBMPI", "")
    with pytest.raises(ConfigError, match="need Open MPI: with MPICH answers came back empty"):
        engine_ranks.join(CoreConfig("torch", model_path="tiny-llama", tp_size=2), sys.executable)
    assert engine_ranks.join(CoreConfig("torch", model_path="tiny-llama"), sys.executable) is None
