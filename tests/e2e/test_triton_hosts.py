"""tritonservers on two hosts, and under a real Slurm: an engine of two ranks as its tasks, or in one of them.

Only with `make test-triton`, as root.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.helpers.clusters import OnHosts, UnderSlurm, or_skip, python_on
from tests.helpers.real_triton import (
    MARKS,
    N_OUTPUT,
    PROMPTS,
    RANKS,
    TRITONSERVER,
    generate,
    repository,
    until_ready,
)
from tests.helpers.support import DONE, Command, Starter, make_samples, wait_until
from tools.hosts import Hosts, hosts
from tools.slurm import Slurm, slurm

pytestmark = MARKS

WITHIN_S = 180.0  # hosts that share two cores start slowly
PORT = 8001
# That of TensorRT-LLM's backend for srun: a task is a rank.
SCRIPT = (
    f"{TRITONSERVER} --model-repository=repo_0 --disable-auto-complete-config"
    " --backend-config=python,shm-region-prefix-name=prefix${SLURM_PROCID}_\n"
)


@pytest.fixture(scope="module")
def two() -> Iterator[Hosts]:
    with or_skip(hosts(2)) as made:
        yield made


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    with or_skip(slurm(2)) as made:
        yield made


def launch(starter: Starter, *options: object) -> list[str]:
    words = (starter.python, "-m", "mpillm", "launch-triton-server", "--model_repo=repo_0")
    return list(map(str, (*words, f"--tritonserver={TRITONSERVER}", *options)))


@pytest.mark.hosts
def test_a_server_on_each_host(two: Hosts, one: Starter) -> None:
    """A person starts one on each, and a test on the first: VALID, with the engine's own tokens, of which
    each server computed some."""
    make_samples(one.folder / "samples.jsonl", [3 + 5 * i % 60 for i in range(32)])
    words = ["--dataset_path", one.folder / "samples.jsonl", "--max_output_len", 8, "--min_query_count", 64]
    words += ["--min_duration", 0.1, "--save_outputs"]
    model = ("--model_path", "tiny-llama")
    ours = one.run(3, *words, *model, core="torch", timeout=WITHIN_S, log_dir=one.folder / "ours").must(DONE)
    generate(one, scenario="Offline")
    servers = {host: one.command(two.on(host, launch(one, f"--log_dir=on-{host}"))) for host in ("h1", "h2")}
    for server in servers.values():
        until_ready(server)
    there = ["--triton_skip_server_spawn", f"--triton_grpc_ports=h1:{PORT}|h2:{PORT}"]
    command = OnHosts(two, one).start("h1:3", "run", "--core_type", "triton_grpc", *there, *words)
    ended = command.end(WITHIN_S).must(DONE)
    assert (ended.result["status"], ended.result["errors"]) == ("VALID", 0), ended
    assert [instance["samples"] > 0 for instance in ended.result["per_instance"]] == [True, True]
    expected = {line["index"]: line["output_tokens"] for line in ours.outputs()}
    assert {line["index"]: line["output_tokens"] for line in ended.outputs()} == expected
    for host, server in servers.items():
        os.kill(python_on(two, host, "launch-triton-server")[0], signal.SIGINT)
        server.end().must(128 + signal.SIGINT)


def check(under: UnderSlurm, command: Command, expected: list[int]) -> None:
    """Ask the server on h1, once it is there, and cancel its job."""
    folder = under.starter.folder

    def is_ready() -> bool:
        logs = [*folder.glob("0.out"), *folder.glob("servers/*.log")]
        assert command.process.poll() is None, f"{command.end()!r}"
        return any("Started GRPCInferenceService" in log.read_text() for log in logs)

    wait_until(is_ready, "a server", WITHIN_S)
    (folder / "prompt.csv").write_text(",".join(map(str, PROMPTS[1])))
    (folder / "answer.csv").write_text(",".join(map(str, expected)))
    words = [
        "triton-client",
        "tokens",
        "-u",
        f"h1:{PORT}",
        "--input-tokens-csv",
        "prompt.csv",
        "--end-id",
        -1,
    ]
    words += ["--request-output-len", N_OUTPUT, "--exclude-input-in-output", "--check-output"]
    client = [under.starter.python, "-m", "mpillm", *words, "--output-tokens-csv", "answer.csv"]
    assert "PASS!" in under.on_head(client, folder).end(WITHIN_S).must(DONE).out
    under.slurm.run("scancel", under.slurm.run("squeue", "-h", "-o", "%i"))
    assert command.end(lingers=WITHIN_S).code != DONE  # what does not end by SIGTERM has 10 s more
    under.wait_for_jobs()


@pytest.mark.slurm
def test_under_slurm(cluster: Slurm, both: Starter) -> None:
    under = UnderSlurm(cluster, both)
    expected = repository(both)[1]
    (both.folder / "triton.sh").write_text(SCRIPT)
    tasks = ["srun", "--nodes=1", "--nodelist=h1", f"--mpi={under.mpi}"]
    script = [*tasks, f"--ntasks={RANKS}", "--output=%t.out", "bash", "triton.sh"]
    check(under, under.on_head(script, both.folder), expected)
    assert "Started GRPCInferenceService" not in (both.folder / "1.out").read_text()

    (both.folder / "0.out").unlink()
    # an mpirun that took part in this allocation would put a rank on the other node, or wait for ever
    allocation = ["salloc", "--nodes=2", "--ntasks=2", "--cpus-per-task=2"]
    step = [*allocation, *tasks, "--overlap", "--ntasks=1"]
    server = launch(both, f"--world_size={RANKS}", "--log_dir=servers")
    check(under, under.on_head([*step, *server], both.folder), expected)


@pytest.mark.slurm
def test_servers_that_ranks_own_under_slurm(cluster: Slurm, both: Starter) -> None:
    """One srun starts a server on each of two nodes, and two clients of each: the engine's own tokens."""
    data = make_samples(both.folder / "samples.jsonl", [3 + 5 * i % 60 for i in range(32)])
    words = ["--dataset_path", data.path, "--max_output_len", 8, "--min_query_count", 64, "--save_outputs"]
    words += ["--min_duration", 0.1]
    model = ("--model_path", "tiny-llama")
    ours = both.run(2, *words, *model, core="torch", timeout=WITHIN_S, log_dir=both.folder / "ours").must(
        DONE
    )
    generate(both, "--triton_num_servers=2", "--triton_num_models_per_server=1", scenario="Offline")
    own = ("--server=tritonserver", "--triton_model_repo=repo", f"--tritonserver={TRITONSERVER}")
    line = ("run", *own, "--clients_per_server", 2, *words, "--log_dir", both.folder / "run")
    where = ["-n", 5, "-N", 2, "--distribution=arbitrary", "-w", "h1,h1,h1,h2,h2"]
    ended = UnderSlurm(cluster, both).start(where, *line).end(WITHIN_S).must(DONE)
    owners = [rank["node"] for rank in ended.json("plan.json")["ranks"] if "server" in rank["roles"]]
    assert owners == ["h1", "h2"] and (ended.result["status"], ended.result["errors"]) == ("VALID", 0), ended
    assert min(client["samples"] for client in ended.result["per_instance"]) > 0
    expected = {line["index"]: line["output_tokens"] for line in ours.outputs()}
    assert {line["index"]: line["output_tokens"] for line in ended.outputs()} == expected
