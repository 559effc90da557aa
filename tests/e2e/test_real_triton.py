"""run-llm-server with a real tritonserver, which loads the model configuration that our writer has written.

Slow, and only where MPILLM_TRITONSERVER names one: the wheel nvidia-pytriton carries a tritonserver for CPUs (docs/pipeline.md says how to
unpack it).
"""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path

import pytest
from support import Starter, wait_until

from mpillm.builder.pbtxt import Name, dump

TRITONSERVER = os.environ.get("MPILLM_TRITONSERVER", "")

MODEL = """
class TritonPythonModel:
    def execute(self, requests):
        pass
"""

SAID = 'a "quoted" \\ word,\na line and ü'


@pytest.mark.slow
@pytest.mark.skipif(not TRITONSERVER, reason="MPILLM_TRITONSERVER names no tritonserver")
def test_a_real_tritonserver(tmp_path: Path, one: Starter) -> None:
    model = tmp_path / "repo_0" / "tokens"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text(MODEL)
    tensor = {"data_type": Name("TYPE_INT32"), "dims": [-1]}
    config = {
        "name": "tokens",
        "backend": "python",
        "max_batch_size": 0,
        "model_transaction_policy": {"decoupled": True},
        "input": [{"name": "input_ids", **tensor}],
        "output": [{"name": "output_ids", **tensor}],
        "instance_group": [{"count": 1, "kind": Name("KIND_CPU")}],
        "parameters": [{"key": "said", "value": {"string_value": SAID}}],
    }
    (model / "config.pbtxt").write_text(dump(config))
    options = ("--harness_type=triton", "--triton_model_repo=repo", f"--tritonserver={TRITONSERVER}", "--triton_grpc_ports=localhost:18101")
    command = one.command([one.python, "-m", "mpillm", "run-llm-server", *options])
    wait_until(lambda: "ready after" in command.out or command.process.poll() is not None, "readiness", 60)
    with urllib.request.urlopen("http://localhost:8000/v2/models/tokens/config") as answer:
        served = json.load(answer)
    assert served["parameters"]["said"]["string_value"] == SAID
    assert served["model_transaction_policy"]["decoupled"] is True
    with urllib.request.urlopen("http://localhost:8000/v2/models/tokens/ready") as answer:
        assert answer.status == 200
    command.process.send_signal(signal.SIGINT)
    assert command.end(30).code == 128 + signal.SIGINT
