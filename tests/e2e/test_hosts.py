"""Runs on several hosts: namespaces with addresses, names, process ids and /dev/shm of their own.

With ``make test-hosts``, as root.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests.helpers.clusters import ENDLESS, ROOT_MAY, SHARED, OnHosts, or_skip, python_on, signal_rank_on
from tests.helpers.failures import check_failure
from tests.helpers.support import DONE, INSTANCE_LOST, ROOT, Command, Ended, Samples, Starter, wait_until
from tools.hosts import HEAD, Hosts, address, hosts

pytestmark = pytest.mark.hosts

N_HOSTS = 3
WITHIN_S = 90.0  # hosts that share two cores start slowly


def test_no_host_but_the_first_needs_the_data_set_or_the_run_directory(
    on_hosts: OnHosts, samples: Samples
) -> None:
    """The others see other folders at those paths, and what they log stays there."""
    folder = on_hosts.starter.folder / "home"
    folder.mkdir()
    data = folder / "samples.jsonl"
    data.write_bytes(samples.path.read_bytes())
    for host in ("h2", "h3"):
        on_hosts.hosts.run(host, "mount", "-t", "tmpfs", "none", str(folder))
    words = ["run", "--core_type", "dummy", "--dataset_path", data, "--max_output_len", 8, "--save_outputs"]
    command = on_hosts.start("h1:2,h2:2,h3:1", *words, log_dir=folder / "run")
    ended = command.end(WITHIN_S).must(DONE)
    for host in ("h2", "h3"):
        logs = on_hosts.hosts.run(host, "ls", str(folder / "run" / "ranks"))
        on_hosts.hosts.run(host, "umount", str(folder))
        assert logs.split() == {"h2": ["rank_0002.log", "rank_0003.log"], "h3": ["rank_0004.log"]}[host]
    assert [rank["node"] for rank in ended.json("plan.json")["ranks"]] == ["h1", "h1", "h2", "h2", "h3"]
    assert {line["index"]: line["output_tokens"] for line in ended.outputs()} == {
        i: samples.answer(i, 8) for i in range(len(samples.prompts))
    }


@pytest.mark.parametrize("host", ["h1", "h2"])
def test_a_log_folder_that_is_read_only_on_one_host(on_hosts: OnHosts, host: str) -> None:
    """The message names rank, host and folder."""
    folder = on_hosts.starter.folder / "home"
    folder.mkdir()
    on_hosts.hosts.run(host, "mount", "-t", "tmpfs", "-o", "ro", "none", str(folder))
    try:
        words = ["run", "--core_type", "dummy", "--min_query_count", 20]
        ended = on_hosts.start("h1:1,h2:1,h3:1", *words, log_dir=folder / "run").end(WITHIN_S)
    finally:
        on_hosts.hosts.run(host, "umount", str(folder))
    assert ended.code != DONE and "Read-only file system" in ended.message and str(folder) in ended.message
    if host == "h2":
        assert re.search(rf"rank 1 \(executor, instance 0\), {host}, pid \d+: {folder}", ended.message), ended


def test_a_cut_cable_of_rank_0s_own_host_is_named(on_hosts: OnHosts) -> None:
    """All ranks of other hosts are lost at the same moment: the network of rank 0's host is."""
    words = ["run", "--core_type", "dummy", *ENDLESS, "--heartbeat_timeout", 8]
    command = on_hosts.start("h1:2,h2:2,h3:2", *words)
    command.wait_phase("test")
    on_hosts.hosts.plug("h1", in_=False)
    try:
        ended = command.end(WITHIN_S, tidy=False)
    finally:
        on_hosts.hosts.plug("h1", in_=True)
    (failure,) = ended.must(INSTANCE_LOST).result["failures"]
    silent = "all other hosts are silent: host h2 (ranks 2-3) and host h3 (ranks 4-5);"
    assert failure["rank"] == 0, ended
    assert failure["cause"].startswith(f"host h1 has lost its network: {silent}"), ended
    assert "host h1 has lost its network" in ended.err, ended


@pytest.mark.parametrize(
    "host, cause", [("h1", "host h1 has lost its network"), ("h2", "the network of h2, and")]
)
def test_a_cut_cable_between_two_hosts(on_hosts: OnHosts, host: str, cause: str) -> None:
    """Only a missing link of rank 0's host tells which cable is cut."""
    words = ["run", "--core_type", "dummy", *ENDLESS, "--heartbeat_timeout", 8]
    command = on_hosts.start("h1:2,h2:2", *words)
    command.wait_phase("test")
    on_hosts.hosts.plug(host, in_=False)
    try:
        ended = command.end(WITHIN_S, tidy=False)
    finally:
        on_hosts.hosts.plug(host, in_=True)
    assert cause in ended.must(INSTANCE_LOST).result["failures"][0]["cause"], ended


def test_the_doctor_measures_every_pair_of_hosts_and_names_who_is_stopped(on_hosts: OnHosts) -> None:
    """The rank is stopped once it has joined MPI, or before; both ways it is named."""
    command = on_hosts.start("h1:2,h2:2,h3:1", "doctor", "--json", log_dir=on_hosts.starter.folder)
    lines = json.loads(command.end(WITHIN_S).must(DONE).out)["lines"]
    (pairs,) = (line["figures"]["pairs"] for line in lines if line["check"] == "MPI between nodes")
    assert {tuple(pair["nodes"]) for pair in pairs} == {("h1", "h2"), ("h1", "h3"), ("h2", "h3")}
    (offsets,) = (line["figures"]["offsets_s"] for line in lines if line["check"] == "clocks")
    assert set(offsets) == {"h2", "h3"}
    (shared,) = (line["figures"]["seen_on"] for line in lines if line["check"] == "shared folder")
    assert shared == ["h2", "h3"]
    command = on_hosts.start("h1:2,h2:2", "doctor", "--deadline", 20, log_dir=on_hosts.starter.folder)

    def rank_1() -> list[int]:
        pids = python_on(on_hosts.hosts, "h1", "doctor")
        return [
            pid for pid in pids if b"OMPI_COMM_WORLD_RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()
        ]

    os.kill(wait_until(rank_1, "rank 1", WITHIN_S)[0], signal.SIGSTOP)
    ended = command.end(WITHIN_S, tidy=False)
    assert ended.code != DONE
    assert re.search(r"rank 1\b.* is stopped: kill -CONT", ended.out + ended.err), ended


def test_a_stopped_rank_of_another_host_is_named(on_hosts: OnHosts) -> None:
    """The other rank of that host sees it."""
    words = ["run", "--core_type", "dummy", *ENDLESS, "--heartbeat_timeout", 8]
    command = on_hosts.start("h1:2,h2:2", *words)
    command.wait_phase("test")
    signal_rank_on(on_hosts.hosts, 2, signal.SIGSTOP)
    ended = command.end(WITHIN_S, tidy=False).must(INSTANCE_LOST)
    named = r"rank 2 \(executor.*\), h2, pid (\d+): is stopped: kill -CONT \1;"
    assert re.search(rf"^  stopped {named}", ended.out, re.MULTILINE), ended
    (failure,) = ended.result["failures"]
    assert failure["rank"] == 2 and "is stopped: kill -CONT" in failure["cause"], ended


def test_a_stopped_rank_0_is_named_by_any_rank_of_its_host(on_hosts: OnHosts) -> None:
    """Rank 1 is on another host, and rank 2 on rank 0's."""
    words = ["run", "--core_type", "dummy", *ENDLESS, "--heartbeat_timeout", 8]
    by_node = {"PRTE_MCA_rmaps_default_mapping_policy": "node"}
    command = on_hosts.start("h1:2,h2:1", *words, exports=by_node)
    command.wait_phase("test")
    signal_rank_on(on_hosts.hosts, 0, signal.SIGSTOP)
    ended = command.end(WITHIN_S, tidy=False).must(INSTANCE_LOST)
    assert re.search(r"rank 2: rank 0 on h1 \(pid (\d+)\) is stopped: kill -CONT \1\n", ended.err), ended


@pytest.mark.parametrize("plain", [False, True], ids=["mpillm mpirun", "mpirun"])
@pytest.mark.parametrize("host, rank", [("h2", (2, 3)), ("h3", (4,))])
def test_a_rank_killed_on_another_host_is_named(
    on_hosts: OnHosts, plain: bool, host: str, rank: tuple[int, ...]
) -> None:
    command = on_hosts.start("h1:2,h2:2,h3:1", "run", "--core_type", "dummy", *ENDLESS, plain=plain)
    command.wait_phase("test")
    os.kill(python_on(on_hosts.hosts, host, "run")[-1], signal.SIGKILL)
    ended = command.end(WITHIN_S)
    if plain:  # mpirun's own exit code, for a rank that a signal ended; its words come beside ours
        assert ended.code == 128 + signal.SIGKILL
        failures = ended.result["failures"]
        assert (ended.result["status"], ended.result["exit_code"]) == ("FAILED", INSTANCE_LOST)
    else:
        failures = ended.result["failures"]
        check_failure(ended, INSTANCE_LOST, "the process has ended", phase="test", within=WITHIN_S)
    assert [failure["rank"] in rank for failure in failures] == [True], ended
    assert f", {host}, pid " in ended.message, "it says where"


def test_a_run_goes_on_without_the_instances_of_another_host(on_hosts: OnHosts, samples: Samples) -> None:
    """Its ranks are killed, all at once."""
    pace = ["--core_options", "ttft_ms:20,tpot_ms:20", "--max_batch_size", 16, "--max_output_len", 8]
    words = ["run", "--core_type", "dummy", "--dataset_path", samples.path, "--test_mode", "AccuracyOnly"]
    command = on_hosts.start("h1:2,h2:2", *words, *pace, "--on_instance_loss", "continue")
    command.wait_phase("test")
    for pid in python_on(on_hosts.hosts, "h2", "run"):
        os.kill(pid, signal.SIGKILL)
    ended = command.end(WITHIN_S).must(DONE)
    assert sorted(ended.accuracy_log()) == [(i, samples.answer(i, 8)) for i in range(len(samples.prompts))]
    assert sorted(lost["instance"] for lost in ended.result["lost"]) == [1, 2]
    assert all(lost["cause"].startswith("the process has ended") for lost in ended.result["lost"]), ended


@pytest.mark.parametrize("mode, policy", [("aggregated", "continue"), ("disaggregated", "fail")])
def test_a_slow_link_that_stalls_makes_a_run_slower_and_nothing_else(
    on_hosts: OnHosts, samples: Samples, mode: str, policy: str
) -> None:
    """A host's cable is pulled again and again, once for seconds: its ranks are not taken for lost."""
    pace = ["--core_options", "ttft_ms:20,tpot_ms:20,kv_bytes_per_token:128", "--max_batch_size", 1]
    words = ["run", "--core_type", "dummy", "--dataset_path", samples.path, "--test_mode", "AccuracyOnly"]
    words += [*pace, "--max_output_len", 8, "--mode", mode, "--on_instance_loss", policy]
    with or_skip(on_hosts.hosts.slow_link("h2", "20mbit")):
        command = on_hosts.start("h1:2,h2:2,h3:1", *words)
        command.wait_phase("test")
        for seconds in (0.5, 0.5, 0.5, 4.0):
            on_hosts.hosts.plug("h2", in_=False)
            time.sleep(seconds)
            on_hosts.hosts.plug("h2", in_=True)
            time.sleep(0.3)
        assert command.process.poll() is None, "all of it was in the test"
        ended = command.end(WITHIN_S).must(DONE)
    assert sorted(ended.accuracy_log()) == [(i, samples.answer(i, 8)) for i in range(len(samples.prompts))]
    assert not ended.result["lost"]


def test_rank_0_lost_ends_the_ranks_of_other_hosts(on_hosts: OnHosts) -> None:
    command = on_hosts.start("h1:1,h2:1,h3:1", "run", "--core_type", "dummy", *ENDLESS)
    command.wait_phase("test")
    os.kill(python_on(on_hosts.hosts, "h1", "run")[0], signal.SIGKILL)
    wait_until(lambda: not python_on(on_hosts.hosts, "h3", "run"), "the end of rank 2", WITHIN_S)
    command.end(WITHIN_S).must(INSTANCE_LOST)


LAYOUTS: dict[str, tuple[str, list[object]]] = {
    "KV caches between hosts": ("h1:2,h2:2,h3:1", ["--mode", "disaggregated"]),
    "a generation instance over two hosts": (
        "h1:2,h2:2,h3:1",
        ["--mode", "disaggregated", "--num_ctx_servers", 1, "--num_gen_servers", 1, "--gen_tp_size", 2],
    ),
    "TP over two hosts": ("h1:2,h2:1,h3:1", ["--tensor_parallelism", 2]),
}


@pytest.mark.parametrize("where, layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_engine_over_hosts_answers_as_on_one(on_hosts: OnHosts, where: str, layout: list[object]) -> None:
    model = ["--model_path", "tiny-llama", "--num_threads", 1, "--device", "cpu"]
    few = ["--min_query_count", 12, "--max_output_len", 12, "--save_outputs"]
    apart = (
        on_hosts.start(where, "run", "--core_type", "torch", *model, *few, *layout).end(WITHIN_S).must(DONE)
    )
    folder = on_hosts.starter.folder / "alone"
    alone = on_hosts.starter.run(2, *model, *few, core="torch", log_dir=folder, timeout=WITHIN_S).must(DONE)
    answers = [{line["index"]: line["output_tokens"] for line in ended.outputs()} for ended in (apart, alone)]
    assert answers[0] == answers[1] and len(answers[0]) == 12


ASK = """
import json, urllib.request
body = {"model": "tiny-llama", "prompt": [1, 2, 3, 4], "max_tokens": 6, "temperature": 0}
request = urllib.request.Request("http://mpillm-0.mpillm:8000/v1/completions", json.dumps(body).encode())
request.add_header("Content-Type", "application/json")
print(urllib.request.urlopen(request, timeout=300).read().decode())
"""


def test_the_pods_of_the_leaderworkerset_serve(one: Starter) -> None:
    """Each host is a pod, with the names, the variables and the command that it would have."""
    template = yaml.safe_load((ROOT / "examples/leaderworkerset.yaml").read_text())["spec"][
        "leaderWorkerTemplate"
    ]
    pods = {"h1": "mpillm-0", "h2": "mpillm-0-1", "h3": "mpillm-0-2"}
    assert template["size"] == len(pods)
    names = "".join(f"{address(host)} {pod}.mpillm {pod}.mpillm.default\n" for host, pod in pods.items())
    given = {
        "LWS_LEADER_ADDRESS": "mpillm-0.mpillm.default",
        "MPILLM_KV_SECRET": "a secret of the cluster",
        "MODEL": "tiny-llama",
        "PATH": f"{Path(one.python).parent}:{os.environ['PATH']}",
        **ROOT_MAY,
    }
    with or_skip(hosts(len(pods))) as made:
        started: list[Command] = []
        for index, (host, pod) in enumerate(pods.items()):
            known = f"127.0.0.1 localhost\n{address(host)} {pod}\n{names}"  # not the others' short names
            made.run(host, "sh", "-c", f"hostname {pod}; printf %s '{known}' > /etc/hosts")
            # A pod has a /tmp of its own, in which is only our folder, if it is below /tmp.
            again = f"mkdir -p {ROOT}; mount --bind /mnt {ROOT}"
            made.run(host, "sh", "-ec", f"mount --bind {ROOT} /mnt; mount -t tmpfs none /tmp; {again}")
            spec = template["leaderTemplate" if index == 0 else "workerTemplate"]["spec"]
            (container,) = spec["containers"]
            # not in our folder, which is below the /tmp that they don't see
            words = ["env", "-C", "/", *container["command"], *container["args"]]
            env = given | {"LWS_WORKER_INDEX": str(index), "POD_IP": address(host)}
            started.append(one.command(made.on(host, words), one.folder, env))

        def ended() -> list[Ended]:
            return [command.end() for command in started if command.process.poll() is not None]

        wait_until(lambda: "leading 2 servers" in started[0].out or ended(), "the leader", WITHIN_S)
        assert not ended()
        ask = one.command(made.on("h2", [one.python, "-c", ASK]), one.folder)
        assert json.loads(ask.end(WITHIN_S).must(DONE).out)["usage"]["completion_tokens"] == 6, ended()
        for command in started:
            command.signal_group(signal.SIGTERM)
        for command in started:
            command.end(WITHIN_S, lingers=WITHIN_S)


HOLD = """
import sys, time
from tools.hosts import hosts
with hosts(1) as made:
    print(*made.processes("head"), *made.processes("h1"), flush=True)
    time.sleep(600)
"""


def test_a_cluster_report_of_hosts(on_hosts: OnHosts) -> None:
    """One of them does not see the folder of the first one's runs."""
    one, made = on_hosts.starter, on_hosts.hosts
    (one.folder / "runs").mkdir()
    made.run("h3", "mount", "-t", "tmpfs", "none", str(one.folder / "runs"))
    words = shlex.join(map(str, on_hosts.mpirun_words("h1:2,h2:1,h3:1")))
    report = ["--cluster_report", one.folder / "cluster.txt", "--log_dir", "runs", "--mpirun", words]
    line = [one.python, "-m", "mpillm", "doctor", *report]
    ended = one.command(made.on(HEAD, list(map(str, line))), env={**ROOT_MAY, **SHARED}).end(240)
    made.run("h3", "umount", str(one.folder / "runs"))
    text = (one.folder / "cluster.txt").read_text()
    assert ended.must(DONE).out.count("by mpirun …") == 3
    assert "nodes: 3" in text and "rank 3 (executor" in text
    assert re.search(r"ok +shared folder +rank 3 on h3:", text), text


def runs(pid: int) -> bool:
    """Return whether a process is there, and more than a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it may end at any moment
        return False


def test_hosts_end_with_their_maker(module_hosts: Hosts) -> None:
    """Nothing runs on after a kill that nobody can handle."""
    maker = subprocess.Popen([sys.executable, "-c", HOLD], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    inside = [int(pid) for pid in maker.stdout.readline().split()]
    assert inside and all(map(runs, inside))
    maker.kill()
    maker.wait()
    maker.stdout.close()
    wait_until(lambda: not any(map(runs, inside)), "the end of the hosts")
