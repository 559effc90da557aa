"""What a command says if a package is missing."""

from __future__ import annotations

import pytest

from disagg.errors import ConfigError
from mpillm.errors import needs_extra


def test_a_missing_package_is_named_with_what_brings_it() -> None:
    with (
        pytest.raises(
            ConfigError, match=r"^x needs the package 'no_such_package': pip install 'mpillm\[y\]'$"
        ),
        needs_extra("x", "y"),
    ):
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401


def test_a_missing_part_of_mpillm_is_a_defect() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_part"), needs_extra("x", "y"):
        import mpillm.no_such_part  # type: ignore[import-not-found]  # noqa: F401
