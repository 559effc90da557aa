"""disagg <- launch <- mpillm, and what may not be imported to start."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("disagg", "launch", "mpillm")  # each may import itself and those before it
HEAVY = ("mpi4py", "torch", "numpy", "yaml", "subprocess", "multiprocessing")


def imported(path: Path) -> Iterator[str]:
    """Yield the absolute name of every module that the file imports, anywhere in it."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield ".".join([*base, *([node.module] if node.module else [])])


@pytest.mark.long
@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package: str) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    later = PACKAGES[PACKAGES.index(package) + 1 :]
    backwards = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in imported(path)
        if name.split(".")[0] in later
    ]
    assert backwards == []


def test_disagg_is_pure_data() -> None:
    allowed = {*sys.stdlib_module_names, "disagg", "yaml"} - {
        "subprocess",
        "socket",
        "multiprocessing",
        "threading",
        "asyncio",
    }
    used = {name.split(".")[0] for path in (ROOT / "disagg").rglob("*.py") for name in imported(path)}
    assert used - allowed == set()


def test_importing_disagg_imports_nothing_heavy() -> None:
    code = f"import sys; import disagg; print([name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        (
            "import mpillm.options.options; from mpillm import workloads;"
            " workloads.get('mixtral-8x7b', 'tiny')",
            HEAVY,
        ),
        # What every rank imports; the harness's imports mpillm.runtime.session as well.
        (
            "import mpi4py; mpi4py.rc.initialize = False; import mpillm.runtime.rank",
            ("mpillm.data.dataset", "mpillm.data.preprocessed.loader", "torch"),
        ),
        ("import mpillm.runtime.choose_samples", ("pandas",)),  # which only pickled data frames need
    ],
    ids=["workloads are light", "no data set but on the harness's rank", "no pandas but for a data frame"],
)
def test_what_is_not_imported(code: str, unwanted: tuple[str, ...]) -> None:
    code = f"{code}; import sys; print([name for name in {unwanted!r} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.long
def test_what_needs_no_rank_does_not_start_mpi() -> None:
    """mpi4py.MPI starts MPI when it is imported: ports on all interfaces, 16 MiB of shared memory."""
    code = """
import importlib, pkgutil, sys
for name in ("mpillm.endpoint", "mpillm.roles", "mpillm.options", "mpillm.data", "mpillm.report"):
    for module in pkgutil.walk_packages(importlib.import_module(name).__path__, name + "."):
        if module.name == "mpillm.endpoint.disagg.server":  # rank 0 imports it
            continue
        importlib.import_module(module.name)
        assert "mpi4py.MPI" not in sys.modules, module.name
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=300, check=True)
