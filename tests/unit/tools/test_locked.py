"""What `make install LOCKED=1` and `make audit` say and do."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import audit, lock

ROOT = Path(__file__).parents[3]


def prints(*packages: dict[str, Any], code: int = 0) -> str:
    """Return a program that prints pip-audit's JSON."""
    return f"print({json.dumps({'dependencies': packages, 'fixes': []})!r}); raise SystemExit({code})"


GOOD: dict[str, Any] = {"name": "a", "version": "1", "vulns": []}
HOLE: dict[str, Any] = {
    "name": "b",
    "version": "2",
    "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"], "aliases": []}],
}
UNKNOWN = {"name": "c", "skip_reason": "Dependency not found on PyPI and could not be audited: c (1)"}
NO_NETWORK = (
    "import sys; print('Traceback\\nConnectionError: no route', file=sys.stderr); raise SystemExit(1)"
)


def pins() -> set[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = {line.partition(";")[0] for line in lines if line and not line.startswith("#")}
    return {
        re.sub(r"[-_.]+", "-", pin.partition("==")[0]).lower() + "==" + pin.partition("==")[2]
        for pin in found
    }


def test_what_is_locked_is_what_is_pinned() -> None:
    """Every package has hashes and one version, which is the pinned one; all that is pinned is there."""
    locked = lock.read(lock.LOCKED.read_text())
    names = [pin.partition("==")[0] for pin in locked]
    assert len(names) == len({*names}) > 80
    assert {*locked} - pins() <= {pin for pin in locked if pin.startswith("setuptools==")}
    assert pins() - {*locked} == {pin for pin in pins() if pin.startswith("nvidia-pytriton==")}


def test_hashes_of_other_machines_stay() -> None:
    a, b = "a" * 64, "b" * 64
    one = {
        "metadata": {"name": "A_b", "version": "1.0+cpu"},
        "download_info": {"archive_info": {"hashes": {"sha256": a}}},
    }
    ours = {"metadata": {"name": "mpillm", "version": "0"}, "download_info": {"dir_info": {}}}
    assert lock.locked([one, ours], {}) == f"a-b==1.0 --hash=sha256:{a}\n"
    text = lock.locked([one], {"a-b==1.0": {b}, "a-b==0.9": {b}})
    assert text == f"a-b==1.0 --hash=sha256:{a} --hash=sha256:{b}\n" and lock.read(text) == {
        "a-b==1.0": {a, b}
    }
    other = {**one, "metadata": {"name": "other", "version": "2"}}
    assert lock.added([one, ours, other], {"a-b==1.0": {b}, "c==1": {a}}) == (
        f"a-b==1.0 --hash=sha256:{a} --hash=sha256:{b}\nc==1 --hash=sha256:{a}\n",
        ["other==2"],
    )
    torch = {**one, "metadata": {"name": "torch", "version": "1", "requires_dist": ["nvidia-nccl-cu13"]}}
    assert lock.added([torch], {"torch==1": {b}})[0] == f"torch==1 --hash=sha256:{b}\n"
    with pytest.raises(ValueError, match="not a locked package: a==1"):
        lock.read("a==1\n")


@pytest.mark.parametrize(
    ("code", "exit_code", "message"),
    [
        (prints(GOOD), 0, "0 known holes in 1 packages"),
        (prints(GOOD, HOLE, code=1), 1, "b 2: PYSEC-1, mended in 3"),
        (prints(GOOD, UNKNOWN), 0, "not looked up: c"),
        (prints(UNKNOWN, UNKNOWN), 77, "SKIPPED: pip-audit: its data has none of the 2 packages"),
        (NO_NETWORK, 77, "SKIPPED: pip-audit: ConnectionError: no route"),
        ("raise SystemExit(2)", 77, "SKIPPED: pip-audit: exit code 2"),
        ("import time; time.sleep(60)", 77, "SKIPPED: pip-audit: it has not ended within 1 s"),
    ],
)
def test_an_audit_that_has_no_data_is_skipped(
    code: str, exit_code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deadline_s = 1.0 if "sleep" in code else 60.0
    assert audit.audit([sys.executable, "-c", code], tmp_path, deadline_s) == exit_code
    assert message in capsys.readouterr().out
