"""What ranks read of the options is what the options' declarations say, which `run` and `serve` go by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.helpers.make_checkpoint import make_tokenizer
from tests.helpers.scripted_server import ScriptedServer
from tests.helpers.serve_command import serve
from tests.helpers.support import Starter
from tests.helpers.traced_options import CONVERSATIONS, OF_A_CLIENT, PROMPTS, SERVER, SERVING, lies, read_by

DISAGGREGATED = ("--mode=disaggregated", "--test_mode=AccuracyOnly", *PROMPTS)
RUNS: Mapping[str, Sequence[Sequence[str]]] = {
    "run": [SERVER, DISAGGREGATED, CONVERSATIONS],
    "serve": [SERVING],
}
OF_GPUS = ["kv_cache_free_gpu_mem_fraction"]


@pytest.mark.parametrize("command", ["run", "serve"])
@pytest.mark.parametrize(
    ("core", "words"), [("dummy", ()), ("torch", ("--model_path=tiny-llama", "--device=cpu"))]
)
def test_a_core_reads_its_declared_options(
    one: Starter, core: str, words: tuple[str, ...], command: str
) -> None:
    of_core = (f"--core_type={core}", *words)
    read = read_by(one, command, of_core, RUNS)
    assert len(read) > 40
    wrong = lies(core, command, read, OF_GPUS)
    assert not wrong, "\n".join(f"{name} {what}" for name, what in wrong.items())


@pytest.mark.parametrize("command", ["run", "serve"])
def test_a_client_of_http_servers_reads_its_declared_options(
    one: Starter, tmp_path: Path, command: str
) -> None:
    """With our own `serve`."""
    make_tokenizer(tmp_path / "model")
    _, host, port = serve(one, 2, "--core_type", "dummy")
    of_core = (
        "--core_type=trtllm_endpoint",
        f"--trtllm_server_urls={host}:{port}",
        f"--model_path={tmp_path / 'model'}",
    )
    read = read_by(one, command, of_core, OF_A_CLIENT)
    wrong = lies("trtllm_endpoint", command, read)
    assert not wrong, "\n".join(f"{name} {what}" for name, what in wrong.items())


@pytest.mark.parametrize("command", ["run", "serve"])
def test_a_client_of_disaggregated_servers_reads_its_declared_options(
    one: Starter, tmp_path: Path, command: str
) -> None:
    make_tokenizer(tmp_path / "model")
    yaml = tmp_path / "disagg.yaml"
    with ScriptedServer() as server:
        host, _, port = server.address.partition(":")
        yaml.write_text(
            f"{{hostname: {host}, port: {port}, context_servers: {{}}, generation_servers: {{}}}}"
        )
        of_core = (
            "--core_type=trtllm_disagg",
            f"--disagg_config={yaml}",
            "--core_options=model:scripted",
            f"--model_path={tmp_path / 'model'}",
        )
        read = read_by(one, command, of_core, OF_A_CLIENT)
    wrong = lies("trtllm_disagg", command, read)
    assert not wrong, "\n".join(f"{name} {what}" for name, what in wrong.items())
