"""Every --help fits a terminal of 80 columns."""

from __future__ import annotations

import re
import shlex

import pytest

from mpillm.cli import COMMANDS, main
from mpillm.experiments.commands.bench import BENCHES

COMMANDS_TYPED = [
    "--help",
    "bench",
    *(f"{name} --help" for name in COMMANDS),
    *(f"{name} --help all" for name in ("run", "serve")),
    *(f"bench {name} --help" for name in BENCHES),
    "triton-client tokens --help",
    "triton-client text --help",
]


@pytest.mark.parametrize("typed", COMMANDS_TYPED)
def test_help_fits_80_columns(
    typed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Examples are typed as a shell takes them."""
    monkeypatch.setenv("COLUMNS", "80")
    try:
        main(typed.split())
    except SystemExit as end:
        assert not end.code
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert not [line for line in text.splitlines() if re.search(r"\w[-/]$", line)], "a broken word"
    assert "usage: python -m mpillm" in text
    for line in text.replace("\\\n", "").splitlines():
        if line.startswith("  python -m mpillm"):
            assert shlex.split(line)[:3] == ["python", "-m", "mpillm"]
            assert shlex.split(line)[3] in COMMANDS


def test_a_command_that_goes_on_keeps_its_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    from launch.help_format import HelpFormatter

    line = "  python -m mpillm ab " + " ".join(f'"--max_batch_size {i}  x"' for i in range(8)) + " --a='b c'"
    text = HelpFormatter("x")._fill_text(f"example:\n{line}", 60, "")
    assert max(map(len, text.splitlines())) <= 60
    assert shlex.split(text.partition("\n")[2].replace("\\\n", "")) == shlex.split(line)
