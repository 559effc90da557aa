"""Runs under a real Slurm of two nodes, Open MPI over PMIx and MPICH over PMI2. With ``make test-slurm``."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.clusters import ENDLESS, UnderSlurm, or_skip, python_on, signal_rank_on
from tests.helpers.support import DONE, INSTANCE_LOST, USAGE, Command, Ended, Starter, wait_until
from tools.hosts import HEAD
from tools.slurm import Slurm, slurm

pytestmark = pytest.mark.slurm

WITHIN_S = 90.0  # nodes that share two cores start slowly
DUMMY = ["run", "--core_type", "dummy"]
FEW = [*DUMMY, "--min_query_count", 20]


@pytest.fixture(scope="module")
def two() -> Iterator[Slurm]:
    with or_skip(slurm(2)) as made:
        yield made


@pytest.fixture
def both_under(two: Slurm, both: Starter) -> UnderSlurm:
    return UnderSlurm(two, both)


@pytest.fixture
def under(two: Slurm, one: Starter) -> UnderSlurm:
    return UnderSlurm(two, one)


@pytest.mark.parametrize(
    "tasks, options",
    [
        ([3, 1], ["-n", 4, "-N", 2]),
        ([2, 1], ["-n", 3, "-N", 2, "--ntasks-per-node", 2]),
        ([1, 3], ["-n", 4, "-N", 2, "--distribution=arbitrary", "-w", "h1,h2,h2,h2"]),
    ],
    ids=["block", "most", "uneven"],
)
def test_the_plan_shows_slurms_nodes(both_under: UnderSlurm, tasks: list[int], options: list[object]) -> None:
    log_dir = ["--log_dir", both_under.starter.folder / "run"]
    ended = both_under.start(options, *FEW, *log_dir).end(WITHIN_S).must(DONE)
    nodes = [rank["node"] for rank in ended.json("plan.json")["ranks"]]
    assert nodes == ["h1"] * tasks[0] + ["h2"] * tasks[1]
    assert ended.result["status"] in ("VALID", "INVALID")
    assert "Sorry" not in ended.err, "Open MPI finds its own texts"


def test_the_doctor_examines_slurms_nodes(both_under: UnderSlurm) -> None:
    log_dir = ["--log_dir", both_under.starter.folder / "runs"]
    ended = both_under.start(["-n", 4, "-N", 2], "doctor", "--json", *log_dir).end(WITHIN_S).must(DONE)
    report = json.loads(ended.out)
    assert (report["ranks"], report["nodes"]) == (4, ["h1", "h2"])
    lines = {line["check"]: line for line in report["lines"]}
    assert "srun" in lines["launcher"]["text"] and lines["launcher"]["text"].endswith("one world of 4")
    assert [line["check"] for line in report["lines"] if line["status"] == "failure"] == []
    for check, nodes in (("MPI between nodes", ["h1", "h2"]), ("MPI within nodes", ["h1"])):
        pair = lines[check]["figures"]["pairs"][0]
        assert sorted(set(pair["nodes"])) == nodes and pair["bytes_per_s"] > 0 and pair["latency_s"] > 0
    assert list(lines["clocks"]["figures"]["offsets_s"]) == ["h2"]


def test_a_cluster_report(both_under: UnderSlurm) -> None:
    """Typed once in an allocation, it tries both launchers."""
    folder = both_under.starter.folder
    words = ["doctor", "--cluster_report", folder / "cluster.txt", "--log_dir", folder / "runs"]
    line = ["salloc", "-N", 2, "-n", 4, both_under.starter.python, "-m", "mpillm", *words]
    both_under.on_head(line, folder).end(150).must(DONE)
    text = (folder / "cluster.txt").read_text()
    steps = re.findall(r"^== \d+\. ([^:]+): (\w+), ", text, re.MULTILINE)
    assert len(steps) == 7 and not [step for step, status in steps if status == "failure"], text
    assert text.count("rank 3 (executor") == 2 and f"srun --mpi={both_under.mpi} " in text


FENCE = """
import time
from mpi4py import MPI
from mpillm.comms import pmix
if MPI.COMM_WORLD.rank == 3:
    time.sleep(1)
called = time.time()
pmix.fence()
print("rank", MPI.COMM_WORLD.rank, called, time.time())
"""


def test_no_rank_sends_before_those_of_other_nodes_have_left_mpi_init(under: UnderSlurm) -> None:
    program = [under.starter.python, "-c", FENCE]
    line = ["srun", "-n", 4, "-N", 2, f"--mpi={under.mpi}", *program]
    ended = under.on_head(line, under.starter.folder / "run").end(WITHIN_S).must(DONE)
    lines = [line.split() for line in ended.out.splitlines() if line.startswith("rank")]
    called, left = ([float(words[i]) for words in lines] for i in (2, 3))
    assert len(lines) == 4 and min(left) >= max(called), ended


@pytest.mark.parametrize("host", ["h1", "h2"])
def test_a_killed_rank_is_named(both_under: UnderSlurm, host: str) -> None:
    """srun's exit code is the killed task's: the highest of all."""
    log_dir = ["--log_dir", both_under.starter.folder / "run"]
    command = both_under.start(["-n", 4, "-N", 2], *DUMMY, *ENDLESS, *log_dir)
    command.wait_phase("test")
    signal_rank_on(both_under.slurm.hosts, 3 if host == "h2" else 2)
    ended = command.end(WITHIN_S).must(128 + signal.SIGKILL)
    assert (ended.result["status"], ended.result["exit_code"]) == ("FAILED", INSTANCE_LOST)
    ((rank, cause),) = [(failure["rank"], failure["cause"]) for failure in ended.result["failures"]]
    assert rank == (3 if host == "h2" else 2) and "the process has ended" in cause, ended
    assert f"rank {rank} (" in ended.message and f", {host}, pid " in ended.message
    assert (ended.log_dir / "report.html").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_to_a_job_ends_it_as_ctrl_c_does(both_under: UnderSlurm, number: signal.Signals) -> None:
    """``sbatch --signal=USR1@60`` sends it before the time limit."""
    log_dir = ["--log_dir", both_under.starter.folder / "run"]
    command = both_under.start(["-n", 4, "-N", 2], *DUMMY, *ENDLESS, *log_dir)
    command.wait_phase("test")
    which = [] if number == signal.SIGTERM else ["--signal", number.name.removeprefix("SIG")]
    both_under.slurm.run("scancel", *which, both_under.slurm.run("squeue", "-h", "-o", "%i"))
    ended = command.end(WITHIN_S).must(128 + number)
    assert ended.message.startswith(f"mpillm: interrupted ({number.name}) in phase 'test'")
    assert (ended.result["status"], ended.result["exit_code"]) == ("FAILED", 128 + number)
    assert [failure["cause"] for failure in ended.result["failures"]] == [f"interrupted ({number.name})"]
    assert (ended.log_dir / "report.html").exists()
    both_under.wait_for_jobs()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_to_an_allocation_ends_its_mpirun_as_ctrl_c_does(
    both_under: UnderSlurm, number: signal.Signals
) -> None:
    """Slurm sends it to the ranks and to mpirun's daemons, but not to `mpillm mpirun`."""
    log_dir = both_under.starter.folder / "run"
    mpirun = [both_under.starter.python, "-m", "mpillm", "mpirun", "-n", 4]
    line = ["salloc", "-N", 2, "-n", 4, *mpirun, *DUMMY, *ENDLESS, "--log_dir", log_dir]
    command = both_under.on_head(line, log_dir)
    command.wait_phase("test")
    job = both_under.slurm.run("squeue", "-h", "-o", "%i")
    both_under.slurm.run("scancel", "--signal", number.name.removeprefix("SIG"), job)
    ended = command.end(WITHIN_S).must(128 + number)
    assert (ended.result["status"], ended.result["exit_code"]) == ("FAILED", 128 + number)
    assert [failure["cause"] for failure in ended.result["failures"]] == [f"interrupted ({number.name})"]
    assert f"interrupted ({number.name})" in ended.err and "daemon on" not in ended.err
    assert (ended.log_dir / "report.html").exists()
    both_under.wait_for_jobs()


def sbatch(under: UnderSlurm, *options: object, command: Sequence[object] = (*DUMMY, *ENDLESS)) -> Command:
    """Start a job, an endless run unless `command` says otherwise, followed to its end."""
    folder = under.starter.folder
    where = ["--script", folder / "job.sub", "--log_root", folder, "--output", folder / "job-%j.txt"]
    size = ["--nodes", 2, "--ntasks", 4, "--mpi", under.mpi, "--wait", *options]
    head = [under.starter.python, "-m", "mpillm", "sbatch", *where, *size, "--", *command]
    return under.on_head(head, folder / "slurm-0-0" / "run")


OWN = ["run", "--server=mpillm", "--model_path=tiny-llama", "--num_threads=1", "--min_query_count=8"]


def check_own_servers(ended: Ended) -> None:
    """Each node had a server, which answered requests; its own mpirun kept to its node."""
    owners = [
        rank["node"] for rank in ended.must(DONE).json("plan.json")["ranks"] if "server" in rank["roles"]
    ]
    assert owners == ["h1", "h2"] and (ended.result["status"], ended.result["errors"]) == ("VALID", 0)
    assert min(client["samples"] for client in ended.result["per_instance"]) > 0
    for index in (0, 1):
        plan = json.loads((ended.log_dir / f"server_{index}" / "plan.json").read_text())
        assert {rank["node"] for rank in plan["ranks"]} == {owners[index]}


def test_servers_that_ranks_own(both_under: UnderSlurm) -> None:
    log_dir = both_under.starter.folder / "run"
    ended = both_under.start(["-n", 3, "-N", 2], *OWN, "--log_dir", log_dir).end(150)
    check_own_servers(ended)
    assert not python_on(both_under.slurm.hosts, "h1", "serve")
    assert not python_on(both_under.slurm.hosts, "h2", "serve")


def test_disaggregated_servers_that_ranks_own(under: UnderSlurm) -> None:
    log_dir = under.starter.folder / "run"
    words = (*OWN, "--mode=disaggregated", "--num_gen_servers=1", "--log_dir", log_dir)
    ended = under.start(["-n", 3, "-N", 2], *words).end(150).must(DONE)
    owners = [rank["node"] for rank in ended.json("plan.json")["ranks"] if "server" in rank["roles"]]
    assert owners == ["h1", "h2"] and (ended.result["status"], ended.result["errors"]) == ("VALID", 0)
    handed = sum(client["handed_over"] for client in ended.result["per_instance"])
    assert handed == ended.result["samples"] > 0


def test_servers_that_the_ranks_of_a_job_own(under: UnderSlurm) -> None:
    command = sbatch(under, "--ntasks", 3, command=[*OWN, "--min_duration", 0])
    ended = command.end(150).must(DONE)
    folder = under.starter.folder / f"slurm-{job_of(command)}-0" / "run"
    check_own_servers(replace(ended, log_dir=folder))


def job_of(command: Command) -> str:
    """Return the number of the job, once it is submitted."""
    return str(wait_until(lambda: re.search(r"submitted job (\d+)", command.err), "a job")[1])


def in_test(command: Command, folder: Path) -> Path:
    """Return the run directory in `folder`, once the test goes on."""
    detail = folder / "run" / "mlperf_log_detail.txt"
    wait_until(lambda: detail.exists() and detail.stat().st_size, f"the test in {folder}", WITHIN_S)
    return folder / "run"


@pytest.mark.parametrize("host, rank", [("h1", 2), ("h2", 3)])
def test_a_killed_rank_ends_a_job_with_rank_0s_exit_code(
    both_under: UnderSlurm, host: str, rank: int
) -> None:
    folder = both_under.starter.folder
    command = sbatch(both_under)
    in_test(command, folder / f"slurm-{job_of(command)}-0")
    signal_rank_on(both_under.slurm.hosts, rank)
    ended = command.end(WITHIN_S).must(INSTANCE_LOST)
    named = f"rank {rank} (executor, instance {rank - 1}), {host}, pid "
    assert named in ended.out, "it shows what the job prints"


def test_a_job_whose_rank_0_was_killed_has_its_exit_code_too(both_under: UnderSlurm) -> None:
    """Another rank says so, and writes the result and the page."""
    command = sbatch(both_under)
    run = in_test(command, both_under.starter.folder / f"slurm-{job_of(command)}-0")
    signal_rank_on(both_under.slurm.hosts, 0)
    ended = command.end(WITHIN_S).must(INSTANCE_LOST)
    assert re.search(r"rank 0 on h1 \(pid \d+\) ended without an exit code; rank \d reports this", ended.out)
    result = json.loads((run / "result.json").read_text())
    assert (result["status"], result["exit_code"]) == ("FAILED", INSTANCE_LOST)
    assert (run / "report.html").exists()


def test_an_interrupted_sbatch_names_the_job_that_goes_on(under: UnderSlurm) -> None:
    command = sbatch(under)
    job = job_of(command)
    in_test(command, under.starter.folder / f"slurm-{job}-0")
    # Not the whole group: nsenter, through which it is started, would end by itself.
    (pid,) = python_on(under.slurm.hosts, HEAD, "sbatch")
    os.kill(pid, signal.SIGINT)
    command.process.wait(WITHIN_S)
    assert under.state(job) == "RUNNING"
    under.slurm.run("scancel", job)
    under.wait_for_jobs()
    ended = command.end(WITHIN_S).must(128 + signal.SIGINT)
    assert f"job {job} goes on; end it with: scancel {job}\n" in ended.err


def test_a_requeued_job_has_a_new_folder_and_the_first_names_its_cause(under: UnderSlurm) -> None:
    command = sbatch(under)
    job = job_of(command)
    folder = under.starter.folder
    first = in_test(command, folder / f"slurm-{job}-0")
    under.slurm.run("scontrol", "requeue", job)
    wait_until(
        lambda: "interrupted" in (first / "result.json").read_text(), "the first run's result", WITHIN_S
    )
    second = folder / f"slurm-{job}-1"

    def has_begun_again() -> bool:
        # Slurm sets it to two minutes later when the first run has ended on all nodes, also after an update.
        under.slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        return second.exists()

    wait_until(has_begun_again, "the requeued job", WITHIN_S, every_s=1)
    second = in_test(command, second)
    under.slurm.run("scancel", job)
    ended = command.end(WITHIN_S)
    assert ended.code != DONE and f"job {job}: CANCELLED" in ended.err
    for run in (first, second):
        result = json.loads((run / "result.json").read_text())
        assert [failure["cause"] for failure in result["failures"]] == ["interrupted (SIGTERM)"]
        assert (result["status"], result["exit_code"]) == ("FAILED", 128 + signal.SIGTERM)


def test_the_time_limit_ends_a_run_as_ctrl_c_does(under: UnderSlurm) -> None:
    """Slurm counts minutes, and looks twice a minute."""
    command = sbatch(under, "--time", 1)
    run = in_test(command, under.starter.folder / f"slurm-{job_of(command)}-0")
    ended = command.end(180)
    assert ended.code != DONE and "TIMEOUT" in ended.err
    result = json.loads((run / "result.json").read_text())
    assert [failure["cause"] for failure in result["failures"]] == ["interrupted (SIGTERM)"]


def test_a_harness_in_an_allocation(both_under: UnderSlurm) -> None:
    """A person in salloc's shell types it once: its mpiruns spread the ranks over the nodes."""
    folder = both_under.starter.folder
    harness = [both_under.starter.python, "-m", "mpillm", "run-harness", *FEW[1:], "--log_dir", "runs"]
    tests = ["--scenarios=Offline,Server", "--server_target_qps", 50, "--world_size", 4]
    ended = both_under.on_head(["salloc", "-N", 2, "-n", 4, *harness, *tests], folder).end(WITHIN_S)
    for name in ("dummy-Offline", "dummy-Server"):
        assert re.search(rf"^{name} +(IN)?VALID .* 0$", ended.must(DONE).out, re.MULTILINE), ended
        plan = json.loads((folder / "runs" / name / "plan.json").read_text())
        assert {rank["node"] for rank in plan["ranks"]} == {"h1", "h2"}


def test_a_harness_in_a_step(both_under: UnderSlurm) -> None:
    """Its mpirun, and what that starts through Slurm, share the step's resources."""
    log_dir = both_under.starter.folder / "run"
    harness = ["run-harness", *FEW[1:], "--scenarios=Offline", "--world_size", 3, "--log_dir", log_dir]
    ended = both_under.start(["-N", 1, "-n", 1], *harness).end(WITHIN_S).must(DONE)
    assert ended.result["status"] == "VALID" and ended.result["world_size"] == 3


def test_a_harness_in_a_step_of_one_of_the_nodes(both_under: UnderSlurm) -> None:
    """Its mpirun has the whole allocation: as many CPUs as tasks there, one on each node."""
    folder = both_under.starter.folder
    harness = [both_under.starter.python, "-m", "mpillm", "run-harness", *FEW[1:], "--scenarios=Offline"]
    step = ["srun", "-n", 1, "--overlap", f"--mpi={both_under.mpi}"]
    size = ["--world_size", 2, "--log_dir", folder / "run"]
    command = both_under.on_head(["salloc", "-N", 2, "-n", 2, *step, *harness, *size], folder / "run")
    ended = command.end(WITHIN_S).must(DONE)
    assert [rank["node"] for rank in ended.json("plan.json")["ranks"]] == ["h1", "h2"]


def test_a_harness_as_several_tasks(under: UnderSlurm) -> None:
    ended = under.start(["-N", 2, "-n", 2], "run-harness", *FEW[1:], "--scenarios=Offline").end(WITHIN_S)
    assert "mpillm: srun started 2 processes of 'run-harness', which runs as one" in ended.must(USAGE).err


def test_a_harness_as_a_job(both_under: UnderSlurm) -> None:
    """A cancelled one ends as Ctrl-C does, and starts no further test.

    Slurm ends the daemons of Open MPI's mpirun, too, which then kills the ranks: at times before rank 0 has
    said why.
    """
    command = sbatch(both_under, command=["run-harness", *DUMMY[1:], *ENDLESS, "--world_size", 4])
    folder = both_under.starter.folder / f"slurm-{job_of(command)}-0"
    run = in_test(command, folder)
    both_under.slurm.run("scancel", job_of(command))
    ended = command.end(WITHIN_S)
    assert "CANCELLED" in ended.err, ended
    both_under.wait_for_jobs()
    result = json.loads((run / "result.json").read_text())
    assert result["status"] == "FAILED", ended
    (cause,) = [failure["cause"] for failure in result["failures"]]
    assert cause.startswith("interrupted (") or (both_under.mpi == "pmix" and "was killed" in cause), ended


SERVERS = """
hostname: h1
port: 8100
model: tiny-llama
context_servers: {num_instances: 1, urls: ["h1:8101"]}
generation_servers: {num_instances: 1, urls: ["h2:8102"]}
"""
ASK = """
import json, urllib.request
body = {"model": "tiny-llama", "prompt": [1, 2, 3, 4], "max_tokens": 6, "temperature": 0}
request = urllib.request.Request("http://h1:8100/v1/completions", json.dumps(body).encode())
request.add_header("Content-Type", "application/json")
print(urllib.request.urlopen(request, timeout=300).read().decode())
"""


WORDS = ["run-llm-server", "--core_type=torch", "--trtllm_disagg_config_path=disagg.yaml", "--num_threads=1"]


def check_answer(under: UnderSlurm) -> None:
    ask = under.on_head([under.starter.python, "-c", ASK], under.starter.folder)
    answer = json.loads(ask.end(WITHIN_S).must(DONE).out)
    assert answer["usage"]["completion_tokens"] == 6


def test_disaggregated_servers_on_two_nodes(both_under: UnderSlurm) -> None:
    """With the workers in one step and the leader in another, the KV cache goes from node to node.

    The YAML is written by the workers' hosts, and a test is run through the servers, from a third step.
    """
    under, folder = both_under, both_under.starter.folder
    where = ["--trtllm_disagg_config_path=disagg.yaml", "--model_path=tiny-llama"]
    ports = ["--server_port=8100", "--worker_start_port=8101"]
    make = under.start(
        ["-n", 2, "-N", 2], "generate-disagg-config", "--core_type=trtllm_disagg", *where, *ports
    )
    make.end(WITHIN_S).must(DONE)
    assert {"h1:8101", "h2:8102"} <= set(re.findall(r"h[12]:810[12]", (folder / "disagg.yaml").read_text()))
    workers = under.start(["-n", 2, "-N", 2], *WORDS, env={"MLPERF_DISAGG_LAUNCH_TYPE": "worker"})
    leader = under.start(["-n", 1, "-w", "h1"], *WORDS, env={"MLPERF_DISAGG_LAUNCH_TYPE": "leader"})
    wait_until(lambda: "h1:8100" in leader.out, "the leader", WITHIN_S)
    check_answer(under)
    few = ["--min_query_count", 4, "--max_output_len", 4, "--scenarios=Offline", "--world_size", 2]
    words = ["run-harness", "--core_type=trtllm_disagg", *where, *few, "--log_dir", folder / "run"]
    test = under.start(["-n", 1, "-w", "h2"], *words).end(WITHIN_S).must(DONE)
    assert (test.result["samples"], test.result["errors"]) == (4, 0)
    under.slurm.run("scancel", "--user=root")
    for command in (leader, workers):
        command.end(WITHIN_S).must(128 + signal.SIGTERM)
    under.wait_for_jobs()


def test_all_servers_of_a_node_in_one_step(both_under: UnderSlurm) -> None:
    """Without MLPERF_DISAGG_LAUNCH_TYPE it starts an mpirun of the workers, and the leader."""
    under, folder = both_under, both_under.starter.folder
    (folder / "disagg.yaml").write_text(SERVERS.replace("h2", "h1"))
    servers = under.start(["-n", 1, "-w", "h1"], *WORDS)
    wait_until(lambda: "ready after" in servers.out or servers.process.poll(), "servers", WITHIN_S)
    assert servers.process.poll() is None, servers.end()
    check_answer(under)
    under.slurm.run("scancel", "--user=root")
    servers.end(WITHIN_S).must(128 + signal.SIGTERM)
    under.wait_for_jobs()
