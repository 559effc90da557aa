"""KV caches that vLLM's servers lose, or never receive: wrong or slow answers that no run may call VALID."""

from __future__ import annotations

import json
import shlex
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.peer_programs import DISAGG, TIMEOUT_S, Show, offline
from tests.helpers.support import DONE, NOT_READY, Ended, Starter

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("nixl")]

LATE_S = 6
LATE = f"""import asyncio


async def late(request, call_next):
    if b'"do_remote_prefill":true' in (await request.body()):
        await asyncio.sleep({LATE_S})
    return await call_next(request)
"""


def run(one: Starter, model: Path, data: Path, server_args: str, code: int = DONE) -> Ended:
    """Run a test with two vLLM servers, which ends with an exit code."""
    options = ("--dataset_path", data, "--model_path", model, "--max_output_len", 16, "--dtype", "float32")
    more = ("--save_outputs", "--min_duration", 0, f"--server_args={server_args}")
    command = one.start(3, *options, *DISAGG, *more, core="trtllm_endpoint")
    return command.end(TIMEOUT_S).must(code)


def test_leases_that_expire(
    model: Path, prompts: Callable[[int], Path], one: Starter, tmp_path: Path, show: Show
) -> None:
    """Requests reach the generation server after their KV caches are gone, and other prompts are there."""
    (tmp_path / "program" / "site" / "late.py").write_text(LATE)
    kv = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    kv["kv_connector_extra_config"] = {"kv_lease_duration": 2}  # type: ignore[assignment]
    few = "--enforce-eager --max-model-len 512 --num-gpu-blocks-override 16 --middleware late.late"
    data, n = prompts(40), 40
    words = ("--dataset_path", data, "--model_path", model, "--max_output_len", 16, "--dtype", "float32")
    ours = offline(one, "ours", "torch", *words)
    ended = run(one, model, data, f"{few} --kv-transfer-config {shlex.quote(json.dumps(kv))}")
    equal = sum(line["output_tokens"] == ours[line["index"]][0] for line in ended.outputs())
    checks = ended.result["server_checks"]
    show(f"leases of 2 s, requests {LATE_S} s late: {equal} of {n} answers right; {checks}")
    assert (ended.result["status"], ended.result["loadgen_result"]) == ("INVALID", "VALID")
    (context,) = [one_ for one_ in ended.result["per_instance"][0]["servers"] if one_["role"] == "context"]
    assert f"context server {context['url']}: " in checks["no_expired_leases"]
    assert "kv_lease_duration" in checks["no_expired_leases"]


def test_a_generation_server_without_a_connector(
    model: Path, prompts: Callable[[int], Path], one: Starter, tmp_path: Path, show: Show
) -> None:
    """It computes every prompt again, and its answers are right."""
    program = tmp_path / "program" / "vllm"
    real = program.rename(program.with_name("vllm_itself"))
    program.write_text(
        f"#!{sys.executable}\n"
        "import os, sys\n"
        "words = sys.argv[1:]\n"
        "if any('kv_consumer' in word for word in words):\n"
        "    at = words.index('--kv-transfer-config')\n"
        "    del words[at : at + 2]\n"
        f"os.execv({str(real)!r}, ['vllm', *words])\n"
    )
    program.chmod(0o755)
    ended = run(one, model, prompts(8), "--enforce-eager --max-model-len 512")
    arrived = ended.result["server_checks"]["contexts_arrived"]
    show(f"a generation server without --kv-transfer-config: {ended.result['status']}, {arrived}")
    assert (ended.result["status"], ended.result["loadgen_result"]) == ("INVALID", "VALID")
    assert arrived.startswith("generation server http://127.0.0.1:") and "--kv-transfer-config" in arrived


ELSEWHERE = """import re


class Elsewhere:
    \"\"\"Replaces the port of the context server in requests by one that never answers.\"\"\"

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        if b'"do_remote_prefill":true' in body:
            size = len(body)
            body = re.sub(rb'"remote_port":\\d+', b'"remote_port":PORT', body).ljust(size)
        pending = [{"type": "http.request", "body": body, "more_body": False}]

        async def again():
            return pending.pop() if pending else await receive()

        await self.app(scope, again, send)
"""


def test_a_handshake_that_times_out(
    model: Path, prompts: Callable[[int], Path], one: Starter, tmp_path: Path, show: Show
) -> None:
    """vLLM answers "Internal server error": the cause is in the generation server's log, and is quoted."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        module = ELSEWHERE.replace("PORT", str(silent.getsockname()[1]))
        (tmp_path / "program" / "site" / "elsewhere.py").write_text(module)
        ended = run(
            one,
            model,
            prompts(2),
            "--enforce-eager --max-model-len 512 --middleware elsewhere.Elsewhere",
            code=NOT_READY,
        )
    show(f"a handshake that times out: {ended.message}")
    assert "HTTP 500" in ended.message and "failures in " in ended.message
    assert "handshake" in ended.message


def test_clean_runs_are_not_doubted(
    model: Path, prompts: Callable[[int], Path], one: Starter, show: Show
) -> None:
    """Disaggregated, with streamed and whole answers, long and short ones, one generation server and two."""
    n_clean = 20
    for i in range(n_clean):
        words: list[object] = ["--temperature", 0.5 * (i % 2), "--log_dir", one.folder / f"run{i}"]
        options = ("--dataset_path", prompts(16), "--model_path", model, "--dtype", "float32")
        more = ("--max_output_len", 2 + 3 * i % 7, "--min_output_len", i % 3, "--min_duration", 0)
        command = one.start(
            3 + i % 2,
            *options,
            *more,
            *DISAGG,
            *words,
            core="trtllm_endpoint",
            log_dir=one.folder / f"run{i}",
        )
        result = command.end(TIMEOUT_S).must(DONE).result
        doubts = [doubt for doubt in result["doubts"] if not doubt.startswith("disturbed")]
        assert (result["status"], doubts) == ("VALID", []), result
        assert set(result["server_checks"].values()) == {""}, result["server_checks"]
    show(f"{n_clean} clean disaggregated runs of vLLM: none is doubted")
