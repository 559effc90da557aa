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
import numpy as np
import triton_python_backend_utils as pb
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for token in pb.get_input_tensor_by_name(request, "input_ids").as_numpy():
                sender.send(pb.InferenceResponse([pb.Tensor("output_ids", np.array([token], np.int32))]))
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
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
    body = json.dumps({"input_ids": [5, 6, 7]}).encode()
    request = urllib.request.Request("http://localhost:8000/v2/models/tokens/generate_stream", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        tokens = [json.loads(line[5:])["output_ids"] for line in answer.read().decode().splitlines() if line.startswith("data:")]
    assert tokens == [5, 6, 7]
    command.process.send_signal(signal.SIGINT)
    assert command.end(30).code == 128 + signal.SIGINT
