"""A fake of MLCommons' client for MLPerf Endpoints."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.helpers.make_checkpoint import make_tokenizer

# As MLCommons' client: it reads its configuration, and leaves what the commands read of its report.
CLIENT = """#!{python}
import json, pathlib, sys, time
import yaml
config = yaml.safe_load(pathlib.Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
if "{fails}":
    sys.exit("{fails}")
n = config["settings"]["runtime"]["n_samples_to_issue"]
folder = pathlib.Path(config["report_dir"])
(folder / "performance").mkdir(parents=True)
(folder / "config.yaml").write_text(yaml.safe_dump(config | {{"resolved": True}}))
latency = {{"avg": 1e6, "total": 1e6 * n, "percentiles": {{"50.0": 1e6, "90.0": 2e6, "99.0": 3e6}}}}
summary = dict(version="0.1.0", git_sha=None, n_samples_issued=n, n_samples_completed=n)
summary |= dict(n_samples_failed={failed}, duration_ns=n * {ns}, complete=True, state="complete", tps=8.0)
summary |= dict(ttft=latency, tpot=latency, latency=latency)
summary |= dict(output_sequence_lengths={{"total": 2 * n, "percentiles": {{}}}})
(folder / "performance" / "result_summary.json").write_text(json.dumps(summary))
"""


def install_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, failed: int = 0, fails: str = ""
) -> list[str]:
    """Put a fake of MLCommons' client into PATH; return the options that it needs."""
    program = tmp_path / "bin" / "inference-endpoint"
    program.parent.mkdir(exist_ok=True)
    made = CLIENT.format(python=sys.executable, fails=fails, failed=failed, ns=10**6)
    program.write_text(made)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    model = tmp_path / "model"
    make_tokenizer(model)
    return ["--harness", "inference-endpoint", "--model_path", str(model)]
