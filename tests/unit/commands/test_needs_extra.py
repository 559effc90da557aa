"""What a command says if a package is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.errors import ConfigError
from mpillm.cores.registry import BackendRegistry
from mpillm.errors import needs_extra


def test_a_missing_package_is_named_with_what_brings_it() -> None:
    with (
        pytest.raises(
            ConfigError, match=r"^x needs the package 'no_such_package': pip install 'mpillm\[y\]'$"
        ),
        needs_extra("x", "y"),
    ):
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401


def test_a_missing_package_behind_another_error_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As tritonclient does without its extra grpc.
    (tmp_path / "a_partial_package.py").write_text(
        "try:\n    import no_such_package\nexcept ModuleNotFoundError as error:\n"
        "    raise RuntimeError('The installation does not include it') from error\n\nclass Core: ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    lacking = "needs the package 'no_such_package'"
    with pytest.raises(ConfigError, match=f"^x {lacking}"), needs_extra("x", "y"):
        import a_partial_package  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(ConfigError, match=f"^--core_type a_partial_package:Core {lacking}$"):
        BackendRegistry.declared("a_partial_package:Core")


def test_a_missing_part_of_mpillm_is_a_defect() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_part"), needs_extra("x", "y"):
        import mpillm.no_such_part  # type: ignore[import-not-found]  # noqa: F401
