"""What goes wrong between triton_grpc and a real tritonserver is named, bounded, and not lost in silence.

Only with `make test-triton`.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

from tests.helpers.ports import free_port
from tests.helpers.real_triton import EMBEDDED, MARKS, generate, start, until_ready
from tests.helpers.support import (
    DONE,
    INSTANCE_LOST,
    NOT_READY,
    TEST_FAILED,
    Command,
    Ended,
    Starter,
    wait_until,
)

pytestmark = MARKS

TIMEOUT_S = 180.0
REFUSED, SILENT, COUNT, PLAIN = 250, 251, 252, 7
# A model of zero cost, to which the first token of a prompt says what to do.
FAULTY = f"""
import numpy as np
from mpillm.triton.models import null_model
from mpillm.triton.models.null_model import FINAL, answer, pb_utils

class TritonPythonModel(null_model.TritonPythonModel):
    kept = []

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            first = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy().reshape(-1)[0]
            stop = pb_utils.get_input_tensor_by_name(request, "stop")
            if stop is not None and stop.as_numpy().reshape(-1)[0]:
                sender.send(flags=FINAL)
            elif first == {REFUSED}:
                error = pb_utils.TritonError("told to refuse")
                sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
            elif first == {SILENT}:
                self.kept.append(sender)
            elif first == {COUNT}:
                n = sum(not kept.is_cancelled() for kept in self.kept)
                sender.send(answer(np.array([n], np.int32)), flags=FINAL)
            else:
                super().execute([_Again(request, sender)])

    def finalize(self):
        for sender in self.kept:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("the model ends")), flags=FINAL)

class _Again:
    def __init__(self, request, sender):
        self.inputs, self.get_response_sender = request.inputs, lambda: sender
"""


def test_faults(one: Starter) -> None:
    """Each fault leaves the server able to serve the next test, but the last, which is its death."""
    generate(one, flags=EMBEDDED)
    (program,) = (one.folder / "repo_0").glob("*/1/model.py")
    lines = program.read_text().splitlines()
    program.write_text("\n".join([*lines[:-1], FAULTY]))
    port = free_port()
    servers = until_ready(start(one, [port]))
    address = ("--triton_grpc_ports", f"localhost:{port}")

    a_request_that_fails(one, address)
    a_response_that_never_comes(one, address)
    many_streams(one, address)
    a_client_that_goes_away(one, address, port)
    server = the_server(servers)
    os.kill(server, signal.SIGSTOP)
    a_server_that_does_not_answer(one, address, port)
    os.kill(server, signal.SIGCONT)
    a_server_that_dies(one, address, port, servers)


def test_a_models_process_dies(one: Starter) -> None:
    """tritonserver stays ready without it."""
    generate(one)
    servers = until_ready(start(one, [free_port()]))
    (model,) = (
        pid
        for pid in servers.pids()
        if b"triton_python_backend_stub" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(model, signal.SIGSEGV)
    ended = servers.end(60).must(INSTANCE_LOST)
    assert f"tritonserver 0: its process {model} (triton_python_backend_stub) has ended" in ended.message, (
        ended
    )


def the_server(servers: Command) -> int:
    """Return the process of the server itself."""
    (pid,) = (
        pid for pid in servers.pids() if Path(f"/proc/{pid}/comm").read_text().strip() == "tritonserver"
    )
    return pid


def begin(one: Starter, firsts: list[int], *options: object, n_queries: int = 0) -> Command:
    """Start a test of prompts with these first tokens."""
    lines = [json.dumps({"input_tokens": [first, 1, 2]}) for first in firsts]
    (one.folder / "samples.jsonl").write_text("\n".join(lines))
    words = ("--dataset_path", one.folder / "samples.jsonl", "--max_output_len", 4, "--min_duration", 0.1)
    count = ("--min_query_count", n_queries or len(firsts))
    return one.start(2, *words, *count, *options, core="triton_grpc")


def run(one: Starter, firsts: list[int], *options: object, n_queries: int = 0) -> Ended:
    return begin(one, firsts, *options, n_queries=n_queries).end(TIMEOUT_S)


def logged(ended: Ended) -> str:
    return "".join(path.read_text() for path in sorted((ended.log_dir / "ranks").glob("*.log")))


def a_request_that_fails(one: Starter, address: tuple[str, str]) -> None:
    """Check that it is counted and logged, and that the others are answered."""
    ended = run(one, [PLAIN, REFUSED, PLAIN, PLAIN], *address).must(DONE)
    assert (ended.result["errors"], ended.result["samples"]) == (1, 4), ended
    assert f"tritonserver {address[1]}: told to refuse" in logged(ended)


def a_response_that_never_comes(one: Starter, address: tuple[str, str]) -> None:
    """Check that with a limit for requests only that one fails, and that without one the silent server ends
    the test."""
    ended = run(one, [PLAIN, SILENT, PLAIN], *address, "--triton_request_timeout", 10).must(DONE)
    assert (ended.result["errors"], ended.result["samples"]) == (1, 3), ended
    assert "no whole answer within --triton_request_timeout 10 s" in logged(ended)
    ended = run(one, [PLAIN, SILENT, PLAIN], *address, "--stall_timeout", 15).must(TEST_FAILED)
    message = f"tritonserver {address[1]}: no response for 13.5 s; outstanding requests: 1 (ids "
    assert message in ended.message, ended


def many_streams(one: Starter, address: tuple[str, str]) -> None:
    """Check a thousand streams at once, on the channels that they need."""
    clients = ("--triton_num_clients_per_frontend", 1000)
    ended = run(one, [PLAIN] * 64, *address, *clients, n_queries=4000).must(DONE)
    assert (ended.result["errors"], ended.result["samples"]) == (0, 4000), ended
    (instance,) = ended.result["per_instance"]
    assert (instance["clients"], instance["channels"]) == (1000, 10)


def a_client_that_goes_away(one: Starter, address: tuple[str, str], port: int) -> None:
    """Check that the server learns of it: no request of its stays open there."""
    command = begin(one, [SILENT] * 16, *address)
    wait_until(lambda: n_open(one, port) == 16, "requests that are open", TIMEOUT_S)
    command.kill()
    wait_until(lambda: n_open(one, port) == 0, "no request that is open", TIMEOUT_S)


def n_open(one: Starter, port: int) -> int:
    """Return how many requests without an answer the model has."""
    (one.folder / "count.csv").write_text(f"{COUNT},1")
    (model,) = (path.parent.name for path in (one.folder / "repo_0").glob("*/config.pbtxt"))
    words = ("tokens", "-u", f"localhost:{port}", "--model-name", model, "--input-tokens-csv", "count.csv")
    out = one.mpillm("triton-client", *words).must(DONE).out
    (n,) = json.loads(out.splitlines()[-1].removeprefix("Output sequence:  "))
    return int(n)


def a_server_that_does_not_answer(one: Starter, address: tuple[str, str], port: int) -> None:
    """Check that gRPC's deadline ends the wait for a server that holds its port and says nothing."""
    ended = run(one, [PLAIN], *address, "--load_deadline", 10).must(NOT_READY)
    assert f"tritonserver {address[1]} was not ready within 9 s: DEADLINE_EXCEEDED" in ended.message
    words = ("tokens", "-u", f"localhost:{port}", "--input-tokens-csv", "count.csv", "-t", 10)
    ended = one.mpillm("triton-client", *words).must(TEST_FAILED)
    assert "has not answered within 10 s" in ended.message


def a_server_that_dies(one: Starter, address: tuple[str, str], port: int, servers: Command) -> None:
    """Check that the test and run-llm-server both say so at once, the latter with its last lines."""
    rate = ("--scenarios", "Server", "--server_target_qps", 20)
    command = begin(one, [PLAIN] * 8, *address, *rate, n_queries=6000)
    command.wait_phase("test")
    os.kill(the_server(servers), signal.SIGKILL)
    ended = command.end(TIMEOUT_S).must(TEST_FAILED)
    assert re.search(rf"tritonserver {address[1]}: .+; outstanding requests: [1-9]", ended.message), ended
    ended = servers.end(60).must(INSTANCE_LOST)
    assert "tritonserver 0 was ended by signal 9 (SIGKILL) after it was ready; the end of" in ended.message
    assert "Started GRPCInferenceService" in ended.message
