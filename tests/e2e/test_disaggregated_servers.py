"""Disaggregated serving on the embedded engine: the reference's four commands, and what goes wrong between
servers.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.disaggregated_servers import (
    BODY,
    CONTEXT,
    MODEL,
    TIMEOUT_S,
    ask,
    handed,
    port_of,
    serve,
    write_yaml,
)
from tests.helpers.make_folder import make_folder
from tests.helpers.ports import free_ports
from tests.helpers.support import (
    DONE,
    NOT_READY,
    SLOW_WITH_MPICH,
    USAGE,
    Command,
    Starter,
    wait_until,
)

PERF_METRICS = ("--perf_metrics_max_requests", 100)


def tokens(answered: tuple[int, Any]) -> list[int]:
    status, content = answered
    assert status == 200, content
    made: list[int] = content["choices"][0]["token_ids"]
    return made


class TestFourCommands:
    """The commands are those of the reference's documentation but for paths, the model and the core that
    serves."""

    @SLOW_WITH_MPICH
    def test_a_test_through_them(self, both: Starter) -> None:
        make_folder(both.folder)
        (both.folder / ".venv/bin/python").write_text(f'#!/bin/sh\nexec {both.python} "$@"\n')
        port, *_ = free_ports(3)
        (both.folder / "mpi.py").write_text(MPIRUN)
        run_args = (
            "--benchmarks=llama2-70b --scenarios=offline --core_type=trtllm_disagg"
            " --trtllm_disagg_config_path=disagg.yaml --model_path=tiny-llama --model_scale=tiny"
        )

        def make(ranks: int, target: str, options: str = "", kind: str = "") -> Command:
            words: list[object] = [both.python, "mpi.py", ranks] if ranks else []
            env = {"MLPERF_DISAGG_LAUNCH_TYPE": kind} if kind else {}
            return both.command([*words, "make", target, f"RUN_ARGS={run_args} {options}"], env=env)

        ports = f"--server_port={port} --worker_start_port={port + 1} --ctx_tp_size=2"
        make(3, "generate_disagg_config", ports).end(60).must(DONE)
        workers = make(3, "run_llm_server", "--core_type=torch --log_dir=logs", "worker")
        leader = make(1, "run_llm_server", "--core_type=torch --log_dir=logs", "leader")
        test = make(0, "run_harness", "--log_dir=run --save_outputs").end(TIMEOUT_S).must(DONE)
        assert "VALID" in test.out and test.result["samples"] == 48
        assert workers.out.count(": localhost:") == 2 and f": localhost:{port}\n" in leader.out
        log = (both.folder / "logs/disaggregated_leader.log").read_text()
        for url in (f"context instance 0 at http://localhost:{port + 1}", f"http://localhost:{port + 2}"):
            assert re.search(rf"{url} is ready after [\d.]+ s", log)

        alone = both.run(
            *(1, "--benchmarks=llama2-70b", "--scenarios=offline", "--model_scale=tiny", "--save_outputs"),
            *("--model_path=tiny-llama",),
            core="torch",
            log_dir=both.folder / "alone",
        ).must(DONE)
        through = {line["index"]: line["output_tokens"] for line in test.outputs()}
        assert through == {line["index"]: line["output_tokens"] for line in alone.outputs()}

        if both.mpi == "mpich":  # what started the workers is killed
            workers.process.kill()
            wait_until(lambda: not workers.pids(), f"the processes {workers.pids()} to end", 30)
        else:  # a server is: its command names it, and its mpirun ends the others; the leader names them
            generation = next(pid for pid in workers.pids() if is_server(pid, rank=2))
            os.kill(generation, signal.SIGKILL)
            ended = workers.end(TIMEOUT_S, tidy=False)
            name = f"generation instance 1 at http://localhost:{port + 2}"
            assert ended.code != DONE and f"worker 2 ({name}) was ended by signal 9" in ended.err
            # A process has no environment any more, by which we find it, before its port is closed.
            wait_until(lambda: ask(port, **BODY)[0] == 503, "no server to be there", TIMEOUT_S)
            status, error = ask(port, **BODY)
            names = rf"(context instance 0 at http://localhost:{port + 1}|{name})"
            assert status == 503 and re.match(f"{names} does not answer: ", error["error"]["message"]), error
        leader.process.kill()
        wait_until(lambda: not leader.pids(), f"the processes {leader.pids()} to end", 30)


def is_server(pid: int, rank: int) -> bool:
    """Return whether a process is this rank's server, not the command that has started it."""
    with contextlib.suppress(OSError):  # it has ended
        words, env = (
            Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0") for name in ("cmdline", "environ")
        )
        return (
            b"serve" in words
            and b"-m" in words
            and not {b"OMPI_COMM_WORLD_RANK=%d" % rank, b"PMI_RANK=%d" % rank}.isdisjoint(env)
        )
    return False


class TestTwoServers:
    """Each server is an mpirun of its own, and copes when the other one is missing or fails."""

    def test_what_becomes_of_kv_caches(self, one: Starter) -> None:
        context = serve(one, "context", "--kv_transfer_timeout_ms", 10_000, *PERF_METRICS)
        generation = serve(one, "generation", *PERF_METRICS)
        at, to = port_of(context), port_of(generation)
        whole = tokens(ask(at, **BODY))
        assert len(whole) == 20 and tokens(ask(to, **BODY)) == whole

        # Nobody fetches these; a client that goes is not waited for.
        for _ in range(3):
            handed(ask(at, **BODY, **CONTEXT))
        leave(at, {**BODY, **CONTEXT, "prompt": [9] * 400})

        # The requests of TensorRT-LLM's leader.
        assert ask(at, "/server_info") == ask(to, "/server_info") == (200, {"disaggregated_params": {}})
        sent: dict[str, Any] = {
            "disaggregated_params": {"request_type": "context_only", "disagg_request_id": 77}
        }
        ended = ask(at, **BODY, **sent, stop_token_ids=whole[:1])
        params = handed(ended)
        assert ended[1]["choices"][0]["finish_reason"] == "stop" and params["encoded_opaque_state"] is None
        assert params["ctx_request_id"] == params["disagg_request_id"] == 77

        params = handed(ask(at, **BODY | {"max_tokens": 1}, **sent))
        assert tokens(ask(to, **BODY | {"max_tokens": 1}, disaggregated_params=params)) == whole[:1]
        params = handed(ask(at, **BODY, **sent))
        assert tokens(ask(to, **BODY, disaggregated_params=params)) == whole
        first_ids: list[Any] = []
        rest_ids: list[Any] = []

        def all_reported() -> bool:
            """Each request is reported once, when the engine releases it, after the client has its answer."""
            for port, ids in ((at, first_ids), (to, rest_ids)):
                ids += [
                    metrics.get("ctx_request_id") for metrics in json.loads(ask(port, "/perf_metrics")[1])
                ]
            return first_ids.count(77) >= 3 and rest_ids.count(77) >= 2

        wait_until(all_reported, "metrics of every request", TIMEOUT_S)
        assert first_ids.count(77) == 3 and rest_ids.count(77) == 2 and rest_ids.count(None) == 1
        status, error = ask(to, **BODY, disaggregated_params=params)
        gone = f"context server http://127.0.0.1:{at}: its KV cache cannot be fetched; our log has the cause"
        assert (status, error["error"]["message"]) == (502, gone)
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "ignore_eos": True}
        routed = ask(at, "/v1/chat/completions", **chat, **CONTEXT, prompt_token_ids=[5, 6, 7])
        assert routed[1]["prompt_token_ids"] == [5, 6, 7]  # of a router that has read the chat itself
        status, first = ask(at, "/v1/chat/completions", **chat, **CONTEXT)
        params = handed((status, first)) | {"disagg_request_id": 3}
        check_names(first)
        chat |= {"prompt_token_ids": first["prompt_token_ids"], "disaggregated_params": params}
        status, answer = ask(to, "/v1/chat/completions", **chat)
        assert status == 200 and answer["usage"]["completion_tokens"] == 1
        for i in range(6):
            params = handed(ask(at, **{**BODY, "prompt": [i] * 50}, **CONTEXT))
            leave(to, {**BODY, "prompt": [i] * 50, "max_tokens": 400, "disaggregated_params": params})
        wait_until(lambda: idle(at) and idle(to), "no request and no block at either", TIMEOUT_S)

        status, error = ask(at, **BODY, disaggregated_params={"request_type": "generation_only"})
        assert status == 400 and "this is a context server: context_only" in error["error"]["message"]
        params = handed(ask(at, **BODY, **CONTEXT))
        for pid in context.pids():
            os.kill(pid, signal.SIGKILL)
        context.end(tidy=False)
        status, error = ask(to, **BODY, disaggregated_params=params)
        assert (status, error["error"]["message"]) == (502, gone)
        assert tokens(ask(to, **BODY)) == whole
        wait_until(lambda: idle(to), "no request and no block", TIMEOUT_S)
        generation.process.send_signal(signal.SIGTERM)
        generation.end().must(DONE)

    def test_caches_that_nobody_fetches_leave_room(self, one: Starter) -> None:
        """For requests of other kinds at once, for others of theirs after seconds; they are kept for 60."""
        context = serve(one, "context", "--max_batch_size", 4)
        at = port_of(context)
        unfetched = [
            threading.Thread(target=ask, args=(at,), kwargs={**BODY, **CONTEXT, "prompt": [i] * 9})
            for i in range(20)
        ]
        for thread in unfetched:
            thread.start()
        began = time.monotonic()
        assert len(tokens(ask(at, **BODY))) == 20
        for thread in unfetched:
            thread.join(55.0)
        assert not any(thread.is_alive() for thread in unfetched) and time.monotonic() - began < 55.0

    def test_ctrl_c_while_a_leader_waits(self, one: Starter) -> None:
        port, context, generation = free_ports(3)
        write_yaml(one.folder, port, context, generation)
        leader = one.command(
            [one.python, "-m", "mpillm", "serve", "--server_role", "leader", "--disagg_config", "d.yaml"]
        )
        wait_until(lambda: taken(port), "the leader to have its port", TIMEOUT_S)
        leader.process.send_signal(signal.SIGINT)
        assert leader.end().code == 128 + signal.SIGINT

    def test_a_file_cannot_make_a_rank_the_leader(self, one: Starter) -> None:
        """Ranks cannot be a leader; without the error they would serve the model themselves."""
        (one.folder / "mine.yaml").write_text("server_role: leader\n")
        ended = one.mpillm("mpirun", "-n", 1, "serve", "--config_file", "mine.yaml", *MODEL).must(USAGE)
        assert "--server_role leader needs no ranks: write it on the command line" in ended.message
        assert "server_role is set by mine.yaml" in ended.err

    @pytest.mark.parametrize(
        ("ranks", "expected"),
        [
            (1, "--server_role leader needs --disagg_config"),
            (2, "--server_role leader is one process, but Open MPI's mpirun has started 2"),
        ],
    )
    def test_a_leader_under_mpirun(self, one: Starter, ranks: int, expected: str) -> None:
        """One rank is a leader like any other; the launcher returns its exit code."""
        message = one.mpillm("mpirun", "-n", ranks, "serve", "--server_role", "leader").must(USAGE).message
        assert message.count("mpillm: ") == 1 and message.startswith(f"mpillm: {expected}"), message

    def test_a_leader_whose_servers_never_come(self, one: Starter) -> None:
        port, context, generation = free_ports(3)
        write_yaml(one.folder, port, context, generation)
        ended = one.mpillm(
            *("serve", "--server_role", "leader", "--disagg_config", "d.yaml", "--load_deadline", 1)
        ).must(NOT_READY)
        assert ended.message == (
            "mpillm: not ready within 1 s (--load_deadline):\n"
            f"  context instance 0 at http://localhost:{context}: Connection refused\n"
            f"  generation instance 1 at http://localhost:{generation}: Connection refused\n"
        )


def taken(port: int) -> bool:
    """Return whether somebody has bound a port."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def check_names(answer: dict[str, Any]) -> None:
    """Check the names in an answer: TensorRT-LLM's leader refuses unknown ones.

    Those of a chat are in tensorrt_llm/serve/openai_protocol.py of 1.3.0rc.
    """
    params = {
        *("request_type", "first_gen_tokens", "first_gen_log_probs", "first_gen_logits", "ctx_request_id"),
        *("encoded_opaque_state", "draft_tokens", "disagg_request_id", "ctx_dp_rank", "ctx_info_endpoint"),
        *("schedule_style", "ctx_usage", "conversation_id"),
    }
    choice = {"index", "message", "logprobs", "finish_reason", "stop_reason", "mm_embedding_handle"}
    choice |= {"disaggregated_params", "avg_decoded_tokens_per_iter"}
    assert {*answer} <= {"id", "object", "created", "model", "choices", "usage", "prompt_token_ids"}
    assert {*answer["usage"]} <= {
        "prompt_tokens",
        "total_tokens",
        "completion_tokens",
        "prompt_tokens_details",
    }
    assert {*answer["choices"][0]} <= choice
    assert {*answer["choices"][0]["disaggregated_params"]} <= params


def leave(port: int, body: dict[str, Any]) -> None:
    """Ask, and leave before the answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    connection.request("POST", "/v1/completions", json.dumps(body))
    connection.close()


def idle(port: int) -> bool:
    """Return whether the server holds no request and no block of its KV cache, which it tells later."""
    _, text = ask(port, "/metrics")
    names = "num_requests_running|num_requests_waiting|kv_cache_usage_perc"
    values = re.findall(rf"^mpillm:(?:{names}){{.*}} (\S+)$", text, re.MULTILINE)
    return len(values) == 3 and all(float(value) == 0 for value in values)


MPIRUN = (
    "import os, sys\nfrom launch.find_mpirun import detect\nfrom launch.mpirun import command_line\n"
    "line = command_line(detect(), int(sys.argv[1]), sys.argv[2:], root=True, survive=False)\n"
    "os.execv(line[0], line)\n"
)
