"""A machine without a C compiler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from mpillm.engine.kernels import linear
from mpillm.engine.kernels.cpu_products import cpu_products


@contextlib.contextmanager
def no_compiler() -> Iterator[None]:
    """Let the engine find no compiler for its products on a CPU."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CC", "no-such-compiler")
        cached = cpu_products, linear._compiled
        for function in cached:
            function.cache_clear()
        try:
            yield
        finally:
            for function in cached:
                function.cache_clear()
