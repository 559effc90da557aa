"""What a rank's log begins with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys
from pathlib import Path
from mpillm.report.ranklog import open_rank_log
print(open_rank_log(Path(sys.argv[1]), 0).read_text())
"""


@pytest.mark.parametrize("key", [["--api_key", "sesame"], ["--api-key=sesame"]])
def test_the_command_line_without_a_key(tmp_path: Path, key: list[str]) -> None:
    words = [sys.executable, "-c", CODE, str(tmp_path), "--port", "0", *key, "--host", "here"]
    said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.rstrip().endswith("--port 0 --host here") and "sesame" not in said
