"""mpillm: MLPerf Inference LLM benchmarks on a cluster, from one mpirun.

For programs and notebooks: `run`, `load`, `serve` (docs/howto/from_python.md).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mpillm.version import __version__ as __version__

MYPY = False  # which mypy takes for true: it would check all packages as one import cycle
if TYPE_CHECKING and not MYPY:  # for editors
    from mpillm.runtime.from_python import Run, RunFailed, RunningServer, load, run, serve

__all__ = ["Run", "RunFailed", "RunningServer", "__version__", "load", "run", "serve"]


def __getattr__(name: str) -> Any:
    """Import the API on first use: ranks also import this package, and must start fast."""
    if name in __all__:
        return getattr(importlib.import_module("mpillm.runtime.from_python"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
