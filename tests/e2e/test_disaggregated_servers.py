"""Disaggregated serving on the embedded engine: the reference's four commands, and what goes wrong between
servers.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from http.client import HTTPConnection
from typing import Any

from tests.helpers.make_folder import make_folder
from tests.helpers.support import DONE, Command, Starter, free_ports, wait_until

TIMEOUT_S = 120.0
MODEL = ("--model_path", "tiny-llama", "--max_seq_len", 512)
BODY: dict[str, Any] = {
    "prompt": [5, 6, 7],
    "max_tokens": 20,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}
CONTEXT = {"disaggregated_params": {"request_type": "context_only"}}


def ask(port: int, path: str = "/v1/completions", **body: Any) -> tuple[int, Any]:
    """Status and content of an answer; GET without a body."""
    connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None)
        response = connection.getresponse()
        text = response.read()
    return response.status, json.loads(text) if text.startswith(b"{") else text.decode()


def tokens(answered: tuple[int, Any]) -> list[int]:
    status, content = answered
    assert status == 200, content
    made: list[int] = content["choices"][0]["token_ids"]
    return made


def shown(command: Command, pattern: str) -> re.Match[str]:
    """What a command prints sooner or later."""
    wait_until(
        lambda: re.search(pattern, command.out) or command.process.poll() is not None, pattern, TIMEOUT_S
    )
    found = re.search(pattern, command.out)
    assert found, f"{command.end()!r}"
    return found


class TestFourCommands:
    """As the reference's documentation has them, but for paths, the model and the core that serves."""

    def test_a_test_through_them(self, one: Starter) -> None:
        make_folder(one.folder)
        port, *_ = free_ports(3)
        (one.folder / "mpi.py").write_text(MPIRUN)
        run_args = (
            "--benchmarks=llama2-70b --scenarios=offline --core_type=trtllm_disagg"
            " --trtllm_disagg_config_path=disagg.yaml --model_path=tiny-llama --model_scale=tiny"
        )

        def make(ranks: int, target: str, options: str = "", kind: str = "") -> Command:
            words: list[object] = [sys.executable, "mpi.py", ranks] if ranks else []
            env = {"MLPERF_DISAGG_LAUNCH_TYPE": kind} if kind else {}
            return one.command([*words, "make", target, f"RUN_ARGS={run_args} {options}"], env=env)

        ports = f"--server_port={port} --worker_start_port={port + 1} --ctx_tp_size=2"
        make(3, "generate_disagg_config", ports).end(60).must(DONE)
        workers = make(3, "run_llm_server", "--core_type=torch --log_dir=logs", "worker")
        leader = make(1, "run_llm_server", "--core_type=torch --log_dir=logs", "leader")
        test = make(0, "run_harness", "--log_dir=run --save_outputs").end(TIMEOUT_S).must(DONE)
        assert "VALID" in test.out and test.result["samples"] == 48
        assert workers.out.count(": localhost:") == 2 and f": localhost:{port}\n" in leader.out
        log = (one.folder / "logs/disaggregated_leader.log").read_text()
        for url in (f"context instance 0 at http://localhost:{port + 1}", f"http://localhost:{port + 2}"):
            assert re.search(rf"{url} is ready after [\d.]+ s", log)

        alone = one.run(
            *(1, "--benchmarks=llama2-70b", "--scenarios=offline", "--model_scale=tiny", "--save_outputs"),
            *("--model_path=tiny-llama",),
            core="torch",
            log_dir=one.folder / "alone",
        ).must(DONE)
        through = {line["index"]: line["output_tokens"] for line in test.outputs()}
        assert through == {line["index"]: line["output_tokens"] for line in alone.outputs()}

        # The workers' mpirun is killed: all its processes end, and the leader says who is gone.
        workers.process.kill()
        wait_until(lambda: not workers.pids(), f"the processes {workers.pids()} to end", 30)
        status, error = ask(port, **BODY)
        assert status == 503 and re.match(
            rf"context instance 0 at http://localhost:{port + 1} does not answer: Connection refused",
            error["error"]["message"],
        )
        leader.process.kill()
        wait_until(lambda: not leader.pids(), f"the processes {leader.pids()} to end", 30)


MPIRUN = (
    "import os, sys\nfrom launch.mpirun import command_line, detect\n"
    "line = command_line(detect(), int(sys.argv[1]), sys.argv[2:], root=True, survive=False)\n"
    "os.execv(line[0], line)\n"
)
