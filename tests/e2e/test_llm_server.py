"""run-llm-server, with stand-ins for tritonserver and trtllm-serve: they listen where they are told and
answer health checks."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.helpers.make_checkpoint import make_tokenizer
from tests.helpers.make_folder import make_folder
from tests.helpers.ports import free_port, free_ports
from tests.helpers.serving_place import make_serving_place
from tests.helpers.support import DONE, INSTANCE_LOST, NOT_READY, USAGE, Starter, wait_until

SERVER = f"""#!{sys.executable}
import http.server, os, re, socketserver, subprocess, sys, time
words = sys.argv[1:]
text = " ".join(words)
print("started", *words, flush=True)
print("a rank of somebody's mpirun:", "OMPI_COMM_WORLD_RANK" in os.environ, flush=True)
if os.environ.get("STAND_IN") == "fails":
    sys.exit("no GPU here")
if os.environ.get("STAND_IN") == "leaves":
    subprocess.Popen(["sleep", "120"], start_new_session=True)
if "--model-control-mode=explicit" in words:
    time.sleep(120)
if "disaggregated_mpi_worker" in words:
    import yaml
    made = yaml.safe_load(open(words[words.index("-c") + 1]))
    for section in (made["context_servers"], made["generation_servers"]):
        if not (section.get("model") or made.get("model")):
            sys.exit("TypeError: get_llm_args() missing 1 required positional argument: 'model'")
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")))
    first, port = 0, None
    for section in (made["context_servers"], made["generation_servers"]):
        for url in section["urls"]:
            port = int(url.rpartition(":")[2]) if first == rank else port
            first += section.get("tensor_parallel_size", 1)
    if port is None:
        time.sleep(60)
elif "disaggregated" in words:
    port = int(re.search(r"^port: (\\d+)", open(words[words.index("-c") + 1]).read(), re.MULTILINE)[1])
else:
    port = int(re.search(r"--(?:http-)?port[= ](\\d+)", text)[1])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ready = os.environ.get("STAND_IN") != "never" and self.path in ("/health", "/v2/health/ready")
        self.send_response(200 if ready else 503)
        self.end_headers()
    def log_message(self, *args):
        pass
socketserver.TCPServer.allow_reuse_address = True
socketserver.TCPServer(("", port), Handler).serve_forever()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the commands run: with stand-ins first in PATH, and two model repositories."""
    return make_serving_place(tmp_path, SERVER, monkeypatch)


# Two servers with three ports each: the gRPC ports are named, the other four follow them.
N_TRITON_PORTS = 6


def triton_options(ports: list[int]) -> list[str]:
    return [
        "run-llm-server",
        "--harness_type=triton",
        "--triton_model_repo=repo",
        f"--triton_grpc_ports=localhost:{ports[0]},{ports[1]}",
    ]


def test_servers_are_started_watched_and_ended(place: Path, one: Starter) -> None:
    ports = free_ports(N_TRITON_PORTS)
    command = one.command([one.python, "-m", "mpillm", *triton_options(ports), "--log_dir=logs"])
    wait_until(lambda: "ready after" in command.out or command.process.poll() is not None, "readiness", 30)
    assert f": localhost:{ports[0]},localhost:{ports[1]}\n" in command.out
    assert f"--grpc-port={ports[1]}" in (place / "logs/tritonserver_1.log").read_text()
    command.process.send_signal(signal.SIGINT)
    assert command.end(20).code == 128 + signal.SIGINT  # and no process is left


def test_a_server_that_dies(place: Path, one: Starter) -> None:
    command = one.command(
        [one.python, "-m", "mpillm", *triton_options(free_ports(N_TRITON_PORTS)), "--log_dir=logs"]
    )
    wait_until(lambda: "ready after" in command.out or command.process.poll() is not None, "readiness", 30)
    (victim,) = [pid for pid in command.pids() if b"repo_1" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(victim, signal.SIGKILL)
    ended = command.end(20).must(INSTANCE_LOST)
    assert (
        "tritonserver 1 was ended by signal 9 (SIGKILL) after it was ready; the end of"
        " logs/tritonserver_1.log:\n  | $" in ended.message
    )


def test_a_server_that_dies_and_leaves_a_process(place: Path, one: Starter) -> None:
    """mpirun would wait for what the servers have started, which holds their output open."""
    (place / "repo_1").rename(place / "another")
    text = 'backend: "python" parameters { key: "gpu_device_ids" value { string_value: "0,1" } }'
    (place / "repo_0/model-0/config.pbtxt").write_text(text)
    port, *_ = free_ports(3)
    words = ["run-llm-server", "--harness_type=triton", "--triton_model_repo=repo", "--log_dir=logs"]
    command = one.command(
        [one.python, "-m", "mpillm", *words, f"--triton_grpc_ports=localhost:{port}"],
        env={"STAND_IN": "leaves"},
    )
    wait_until(lambda: "ready after" in command.out or command.process.poll() is not None, "readiness", 60)

    def servers() -> list[int]:
        lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in command.pids()}
        return [pid for pid, words in lines.items() if b"".join(words[1:2]).endswith(b"tritonserver")]

    wait_until(lambda: len(servers()) == 2, "a server for each rank")
    os.kill(servers()[0], signal.SIGKILL)
    command.end(60).must(INSTANCE_LOST)  # and no process is left


def test_a_server_that_never_starts_and_one_that_is_never_ready(place: Path, one: Starter) -> None:
    options = [one.python, "-m", "mpillm", *triton_options(free_ports(N_TRITON_PORTS))]
    ended = one.command(options, env={"STAND_IN": "fails"}).end(30).must(NOT_READY)
    assert (
        "ended with exit code 1 before it was ready" in ended.message and "  | no GPU here" in ended.message
    )
    ended = one.command([*options, "--load_deadline=2"], env={"STAND_IN": "never"}).end(30).must(NOT_READY)
    assert "not ready within 2 s (--load_deadline): tritonserver 0, tritonserver 1" in ended.message


def test_a_taken_port(place: Path, one: Starter) -> None:
    ports = free_ports(N_TRITON_PORTS)
    port = ports[1]
    with socket.create_server(("127.0.0.1", port)):
        ended = one.command([one.python, "-m", "mpillm", *triton_options(ports)]).end(30).must(USAGE)
    assert f"can't listen on port {port} for gRPC of tritonserver 1: process {os.getpid()}" in ended.message
    assert not (place / "build").exists() and not (place / "mpillm-runs").exists()


def test_endpoints(place: Path, one: Starter) -> None:
    port = free_port()
    options = (
        "run-llm-server",
        "--core_type=trtllm_endpoint",
        "--model_path=llama",
        f"--trtllm_server_urls=localhost:{port},elsewhere:{port}",
    )
    flags = "--trtllm_runtime_flags=max_batch_size:8,batch_scheduler_policy:max_util"
    flags += ",kvcache_free_gpu_mem_frac:0.7"
    output = one.mpillm(*options, flags, "--dry_run").must(DONE).out
    assert not (place / "build").exists() and not (place / "mpillm-runs").exists()
    command = one.command([one.python, "-m", "mpillm", *options, flags, "--tensor_parallelism=2"])
    wait_until(lambda: "ready after" in command.out or command.process.poll() is not None, "readiness", 30)
    with urllib.request.urlopen(f"http://localhost:{port}/health") as answer:
        assert answer.status == 200
    command.process.terminate()
    command.end(20)
    (log,) = (place / "mpillm-runs/servers").glob("*/trtllm-serve_0.log")
    words = (
        "serve llama --host 127.0.0.1 --port {} --backend pytorch --tp_size 2 --pp_size 1 --max_batch_size 8"
    )
    assert f"{words.format(port)} --num_postprocess_workers 2 --extra_llm_api_options" in log.read_text()
    yaml = (place / "mpillm-runs/servers/extra_llm_api_options.yaml").read_text()
    assert yaml in output
    assert "free_gpu_memory_fraction: 0.7" in yaml and "capacity_scheduler_policy: MAX_UTILIZATION" in yaml


def test_disaggregated_as_the_reference_starts_it(place: Path, one: Starter) -> None:
    """A YAML is made under mpirun, then workers start under one mpirun, and a leader under another."""
    make_folder(place)
    port = free_ports(3)[0]
    worker_port = port + 1
    args = (
        "--benchmarks=llama2-70b --scenarios=offline --core_type=trtllm_disagg"
        " --trtllm_disagg_config_path=disagg.yaml"
    )
    mpirun = [one.python, "-m", "launch_with_mpirun"]
    (place / "launch_with_mpirun.py").write_text(
        "import os, sys\nfrom launch.find_mpirun import detect\nfrom launch.mpirun import command_line\n"
        "line = command_line(detect(), int(sys.argv[1]), sys.argv[2:], root=True,"
        " survive=False)\nos.execv(line[0], line)\n"
    )
    paths = {"PYTHONPATH": f"{Path(__file__).parents[2]}{os.pathsep}{place}"}
    sizes = f"--ctx_tp_size=2 --gen_tp_size=1 --server_port={port} --worker_start_port={worker_port}"
    one.command([*mpirun, 3, "make", "generate_disagg_config", f"RUN_ARGS={args} {sizes}"], env=paths).end(
        60
    ).must(DONE)
    text = (place / "disagg.yaml").read_text()
    assert (
        f"- localhost:{worker_port}\n" in text
        and f"- localhost:{worker_port + 1}\n" in text
        and "tensor_parallel_size: 2" in text
    )

    run_llm_server = ["make", "run_llm_server", f"RUN_ARGS={args} --log_dir=logs"]
    wrong = one.command(
        [*mpirun, 2, *run_llm_server], env={**paths, "MLPERF_DISAGG_LAUNCH_TYPE": "worker"}
    ).end(60)
    assert (
        wrong.code != DONE
        and wrong.err.count("disagg.yaml has 3 workers, but Open MPI's mpirun started 2 ranks") == 1
    )

    workers = one.command([*mpirun, 3, *run_llm_server], env={**paths, "MLPERF_DISAGG_LAUNCH_TYPE": "worker"})
    leader = one.command([*mpirun, 1, *run_llm_server], env={**paths, "MLPERF_DISAGG_LAUNCH_TYPE": "leader"})
    wait_until(
        lambda: f"localhost:{port}" in leader.out or leader.process.poll() is not None, "the leader", 30
    )
    logs = [place / f"logs/worker_{rank}.log" for rank in range(3)]
    wait_until(
        lambda: all(log.exists() and "mpirun: True" in log.read_text() for log in logs), "the workers", 30
    )
    wait_until(
        lambda: workers.out.count(": localhost:") == 2 or workers.process.poll() is not None,
        "an answer of both instances",
        30,
    )
    assert (
        "disaggregated -c disagg.yaml -t 1800 -r 300" in (place / "logs/disaggregated_leader.log").read_text()
    )
    assert "mpirun: False" in (place / "logs/disaggregated_leader.log").read_text()
    for command in (leader, workers):
        command.signal_group(signal.SIGINT)
        command.end(30, tidy=False)


def test_workers_under_mpillm_mpirun(place: Path, both: Starter) -> None:
    """Ctrl-C ends all workers."""
    make_folder(place)
    port = free_ports(3)[0]
    worker_port = port + 1
    options = ["--core_type=trtllm_disagg", "--trtllm_disagg_config_path=disagg.yaml", "--model_path=llama"]
    ports = [f"--server_port={port}", f"--worker_start_port={worker_port}"]
    mpirun = [both.python, "-m", "mpillm", "mpirun", "-n", 2]
    both.command([*mpirun, "generate-disagg-config", *options, *ports]).end().must(DONE)
    workers = both.command(
        [*mpirun, "run-llm-server", *options, "--log_dir=logs"], env={"MLPERF_DISAGG_LAUNCH_TYPE": "worker"}
    )
    wait_until(  # mpirun may pass on a line in pieces
        lambda: len(re.findall(r"ready after .*\n", workers.out)) == 2 or workers.process.poll() is not None,
        "both workers",
    )
    assert f": localhost:{worker_port}\n" in workers.out, workers.out
    workers.signal_group(signal.SIGINT)
    ended = workers.end(30, tidy=False).must(128 + signal.SIGINT)
    assert "mpillm mpirun: interrupted (Ctrl-C)" in ended.err and "Traceback" not in ended.err


def test_servers_that_never_start_are_named(place: Path, one: Starter) -> None:
    """The embedded engine's servers are refused, both or the workers only: the test names them, and ends."""
    port = free_ports(3)[0]
    make_tokenizer(place / "model")  # without weights
    options = ["--core_type=trtllm_disagg", "--trtllm_disagg_config_path=disagg.yaml"]
    ports = [f"--server_port={port}", f"--worker_start_port={port + 1}", "--model_path=model"]
    mpirun = [one.python, "-m", "mpillm", "mpirun", "-n"]
    one.command([*mpirun, 2, "generate-disagg-config", *options, *ports]).end().must(DONE)
    words = ["run-llm-server", *options, "--core_type=torch", "--log_dir=logs"]
    record, leads = place / "disagg.yaml.servers/leader.json", {"MLPERF_DISAGG_LAUNCH_TYPE": "leader"}
    one.command([*mpirun, 1, *words, "--model_path=nowhere"], env=leads).end(60).must(USAGE)
    works = {"MLPERF_DISAGG_LAUNCH_TYPE": "worker"}
    one.command([*mpirun, 2, *words], env=works).end(60)
    for both in (True, False):
        leader = None
        if not both:
            leader = one.command([*mpirun, 1, *words], env=leads)
            wait_until(lambda: record.exists() and "starting" in record.read_text(), "the leader's record")
        ended = one.mpillm("run-harness", *options, "--dataset=synthetic", "--log_dir=run").must(NOT_READY)
        message = " ".join((ended.out + ended.err).split())
        assert f"localhost:{port}: Connection refused" in message
        why = r"failed [\d,]+ s ago: worker \d \(\w+ instance \d at http://localhost:\d+\) ended with exit"
        assert re.search(rf"run-llm-server \(worker-\d\) on \S+ {why} code 2", message), message
        assert "| mpillm: failed before anything was loaded" in message
        assert ("run-llm-server (leader)" in message) is both and ("--model_path nowhere" in message) is both
        if leader:
            leader.signal_group(signal.SIGINT)
            leader.end(30, tidy=False)
            assert not record.exists()
