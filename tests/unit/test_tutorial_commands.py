"""The Server tests of the tutorials have as many queries as a VALID verdict takes."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from mpillm.loadgen.settings import LoadGenConfig, load_settings
from mpillm.options.command_line import Parser
from mpillm.options.options import parse_run

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorial"
N_PROMPTS = 160  # that come with mpillm
COMMANDS = [
    line
    for page in sorted(TUTORIALS.glob("*.md"))
    for line in page.read_text(encoding="utf-8").splitlines()
    if " mpirun " in line and " run " in line and "--scenarios Server" in line
]


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 3


@pytest.mark.parametrize("line", COMMANDS)
def test_nothing_stands_in_the_way_of_a_valid_verdict(line: str, tmp_path: Path) -> None:
    words = shlex.split(line.partition(" run ")[2].replace("DIR", str(tmp_path)))
    config = parse_run(words, Parser(prog="mpillm run"))
    n_samples = config.workload.n_samples if config.workload is not None else N_PROMPTS
    forecast = load_settings(LoadGenConfig.from_run(config), n_samples).forecast
    assert list(forecast.obstacles) == []
    assert forecast.seconds is not None and forecast.seconds < 300, "a tutorial's run is short"
