"""Runs and servers as child processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from disagg.errors import ConfigError
from mpillm.runtime.from_python import _args
from mpillm.runtime.whole_runs import run_in, served_in

KEY = "sesame"
WRONG = [*_args(None, {"api_key": KEY}), "--no_such_option", "1"]


class Watch:
    """Notes the command lines and the keys of this process's children, each time it is called."""

    def __init__(self) -> None:
        self.looks: list[list[tuple[str, str]]] = []

    def __call__(self) -> str:
        look = []
        for child in psutil.Process().children():
            try:
                look.append((" ".join(child.cmdline()), child.environ().get("MPILLM_API_KEY", "")))
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        self.looks.append([each for each in look if "mpillm mpirun" in each[0]])
        return ""


def run(folder: Path, watch: Callable[[], str]) -> None:
    assert run_in(folder, ("-n", "2"), WRONG, watch).code == 2


def serve(folder: Path, watch: Callable[[], str]) -> None:
    with pytest.raises(ConfigError, match="no_such_option"), served_in(folder, ("-n", "2"), WRONG, watch):
        pass


@pytest.mark.parametrize("start", [run, serve])
def test_a_key_is_on_no_command_line(
    start: Callable[[Path, Callable[[], str]], None], tmp_path: Path
) -> None:
    """All users of the machine can read it there."""
    watch = Watch()
    start(tmp_path / "run", watch)
    seen = [each for look in watch.looks for each in look]
    assert seen and all(KEY not in line for line, _ in seen)
    assert KEY in {key for _, key in seen}


def test_the_last_lines_of_a_run_are_watched(tmp_path: Path) -> None:
    watch = Watch()
    run(tmp_path / "run", watch)
    assert watch.looks[0] and not watch.looks[-1], "the run has ended before the last look"
