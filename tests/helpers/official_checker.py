"""MLCommons' submission checker, unchanged, in its own process.

MPILLM_INFERENCE_REPO names a clone of mlcommons/inference.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

INFERENCE = os.environ.get("MPILLM_INFERENCE_REPO", "")
needs_checker = pytest.mark.skipif(
    not INFERENCE, reason="MPILLM_INFERENCE_REPO is not set: no clone of mlcommons/inference"
)

STOPS = "it stops there"  # what our list says where the checker ends with a traceback

# Tells of each check whether it passed, and changes nothing.
_TELLING = """
import json, sys
from submission_checker.checks.base import BaseCheck
plain = BaseCheck.execute
def execute(self, check):
    passed = False
    try:
        passed = bool(plain(self, check))
        return passed
    finally:
        logs = getattr(self, "submission_logs", None)
        where = [logs.loader_data["benchmark"], logs.loader_data["scenario"]]
        print("CHECK", json.dumps([*where, type(self).__name__, check.__name__, passed]), flush=True)
BaseCheck.execute = execute
from submission_checker import main
sys.exit(main.main())
"""


@dataclass(frozen=True)
class Verdict:
    """Holds what the checker says of a submission."""

    accepts: bool
    failed: set[tuple[str, str, str]]  # benchmark, scenario, check
    checks: int  # that were made
    log: str


def check_submission(output: Path, version: str = "v6.1") -> Verdict:
    """Run the checker on submitter Us in `output`, in that folder's parent."""
    words = ["--input", str(output), "--version", version, "--submitter", "Us"]
    done = subprocess.run(
        [sys.executable, "-c", _TELLING, *words],
        cwd=output.parent,
        env={**os.environ, "PYTHONPATH": str(Path(INFERENCE) / "tools" / "submission")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    checks = [
        json.loads(line.partition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("CHECK")
    ]
    failed = {(benchmark, scenario, check) for benchmark, scenario, _, check, passed in checks if not passed}
    if "Traceback" in done.stderr:
        failed = {("", "", STOPS)}
    return Verdict(done.returncode == 0, failed, len(checks), done.stderr)


def listed(output: str) -> set[tuple[str, str, str]]:
    """Return the checks that `submission` expects to fail, as `Verdict.failed`.

    A check of a benchmark or the system fails in each scenario.
    """
    results = re.findall(r"^  (\S+) (Offline|Server|Interactive|SingleStream): ", output, re.MULTILINE)
    found = set()
    for checks, text in re.findall(r"^  rejected by the checker \(([^)]*)\): (.*)$", output, re.MULTILINE):
        concerned = [result for result in results if text.startswith(f"{' '.join(result)}: ")]
        concerned = concerned or [
            result for result in results if text.startswith((f"{result[0]}: ", "the system description: "))
        ]
        assert concerned, text
        found |= {(*result, check) for result in concerned for check in checks.split(", ")}
    return {("", "", STOPS)} if any(check == STOPS for *_, check in found) else found
