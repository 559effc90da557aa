"""``python -m tools.audit FOLDER``: list known vulnerabilities of the installed packages, with pip-audit.

pip-audit runs in a separate environment in FOLDER. Exit code 0: none, 1: some, 77: its data cannot be reached
(prints SKIPPED).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

SKIPPED = 77
_PIP_AUDIT = "pip-audit==2.10.1"
_DEADLINE_S = 600.0
_VULNERABLE, _CLEAN = 1, 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args(argv).folder
    if not (folder / "bin" / "pip-audit").exists():
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
        ended = subprocess.run([*pip, "install", "-q", _PIP_AUDIT], check=False, timeout=_DEADLINE_S)
        if ended.returncode:
            return _skipped("it cannot be installed; see the output above")
    return audit([str(folder / "bin" / "pip-audit")], Path(sysconfig.get_path("purelib")))


def audit(program: Sequence[str], packages: Path, deadline_s: float = _DEADLINE_S) -> int:
    """Run pip-audit on the packages in a folder; print the vulnerabilities, or why it cannot check."""
    options = ("--progress-spinner", "off", "--skip-editable", "--format", "json")
    command = [*program, "--path", str(packages), *options]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=deadline_s)
    except subprocess.TimeoutExpired:
        return _skipped(f"it has not ended within {deadline_s:g} s")
    try:
        looked_at = json.loads(ended.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return _skipped(ended.stderr.strip().rpartition("\n")[2] or f"exit code {ended.returncode}")
    # Without data of the index, pip-audit skips each package.
    missing = [one["name"] for one in looked_at if "skip_reason" in one]
    if len(missing) == len(looked_at):
        return _skipped(f"its data has none of the {len(missing)} packages")
    holes = [(one["name"], one["version"], hole) for one in looked_at for hole in one.get("vulns", ())]
    for name, version, hole in holes:
        print(f"{name} {version}: {hole['id']}, mended in {', '.join(hole['fix_versions']) or 'no version'}")
    print(f"{len(holes)} known holes in {len(looked_at) - len(missing)} packages")
    if missing:
        print(f"not looked up: {', '.join(missing)}")
    return _VULNERABLE if holes else _CLEAN


def _skipped(why: str) -> int:
    print(f"SKIPPED: pip-audit: {why}")
    return SKIPPED


if __name__ == "__main__":
    sys.exit(main())
