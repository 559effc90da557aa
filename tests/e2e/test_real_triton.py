"""run-llm-server with a real tritonserver, which loads the model configurations that our writer and
generate-triton-config have written.

Only with `make test-triton`.
"""

from __future__ import annotations

import contextlib
import json
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpillm.triton.pbtxt import EnumName, dump
from tests.helpers.ports import free_port
from tests.helpers.real_triton import MARKS, TRITONSERVER
from tests.helpers.support import Starter, wait_until

pytestmark = MARKS

MODEL = """
class TritonPythonModel:
    def execute(self, requests):
        pass
"""

# Reads parameters as TensorRT-LLM's backend does: it fails without those that the backend reads outside of
# any `try`.
AS_THE_BACKEND_READS = """
import json

class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        needed = ("gpt_model_type", "tokenizer_dir", "xgrammar_tokenizer_info_path")
        needed += ("guided_decoding_backend",)
        values = [parameters[name]["string_value"] for name in needed]
        if values != ["inflight_fused_batching", *("${%s}" % name for name in needed[1:])]:
            raise ValueError(values)

    def execute(self, requests):
        pass
"""

PARAMETER = 'a "quoted" \\ word,\na line and ü'


def test_a_real_tritonserver(tmp_path: Path, one: Starter) -> None:
    model = tmp_path / "repo_0" / "tokens"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text(MODEL)
    tensor = {"data_type": EnumName("TYPE_INT32"), "dims": [-1]}
    config = {
        "name": "tokens",
        "backend": "python",
        "max_batch_size": 0,
        "model_transaction_policy": {"decoupled": True},
        "input": [{"name": "input_ids", **tensor}],
        "output": [{"name": "output_ids", **tensor}],
        "instance_group": [{"count": 1, "kind": EnumName("KIND_CPU")}],
        "parameters": [{"key": "said", "value": {"string_value": PARAMETER}}],
    }
    (model / "config.pbtxt").write_text(dump(config))
    with serving(one, "repo", "tokens") as served:
        assert served["parameters"]["said"]["string_value"] == PARAMETER
        assert served["model_transaction_policy"]["decoupled"] is True


def test_a_generated_repository_has_what_the_backend_needs(tmp_path: Path, one: Starter) -> None:
    """The real server reads the whole file.

    TensorRT-LLM's backend, which needs GPUs, has a stand-in with its way to read parameters.
    """
    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / "config.json").write_text(
        '{"pretrained_config": {"mapping": {}}, "build_config": {"max_batch_size": 64}}'
    )
    (engine / "rank0.engine").write_bytes(b"engine")
    options = (
        "--benchmarks=llama2-70b",
        "--scenarios=Server",
        "--engine_dir=engine",
        "--triton_num_servers=1",
        "--triton_model_repo=mine",
    )
    one.command([one.python, "-m", "mpillm", "generate-triton-config", *options]).end(60).must(0)
    model = tmp_path / "mine_0" / "llama2-70b-server-0"
    text = (model / "config.pbtxt").read_text()
    (model / "config.pbtxt").write_text(text.replace('backend: "tensorrtllm"', 'backend: "python"'))
    (model / "1" / "model.py").write_text(AS_THE_BACKEND_READS)
    with serving(one, "mine", model.name) as served:
        assert served["max_batch_size"] == 64 and served["model_transaction_policy"]["decoupled"] is True
        assert served["parameters"]["gpt_model_path"]["string_value"] == str(engine)


@contextlib.contextmanager
def serving(one: Starter, repo: str, model: str) -> Iterator[dict[str, Any]]:
    """Run a tritonserver with the model's configuration, started by run-llm-server, and stop it
    afterwards."""
    port = free_port()
    options = (
        "--harness_type=triton",
        f"--triton_model_repo={repo}",
        f"--tritonserver={TRITONSERVER}",
        f"--triton_grpc_ports=localhost:{port}",
    )
    command = one.command([one.python, "-m", "mpillm", "run-llm-server", *options])
    wait_until(lambda: "ready after" in command.out or command.process.poll() is not None, "readiness", 60)
    if command.process.poll() is not None:
        command.end(30).must(128 + signal.SIGINT)  # shows what it has said
    with urllib.request.urlopen(
        f"http://localhost:{port + 1}/v2/models/{model}/ready", timeout=300
    ) as answer:
        assert answer.status == 200
    with urllib.request.urlopen(
        f"http://localhost:{port + 1}/v2/models/{model}/config", timeout=300
    ) as answer:
        yield json.load(answer)
    command.process.send_signal(signal.SIGINT)
    command.end(30).must(128 + signal.SIGINT)
