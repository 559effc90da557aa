"""run-harness: one mpirun after another, and a table at the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.make_folder import make_folder
from tests.helpers.support import DONE, USAGE, Starter

DUMMY = ("--core_type=dummy", "--min_query_count=8", "--max_output_len=4")


@pytest.mark.smoke
def test_every_scenario_named(one: Starter, tmp_path: Path) -> None:
    make_folder(tmp_path)
    args = " ".join(
        (*DUMMY, "--scenarios=Offline,Server", "--server_target_qps=200", "--world_size=2", "--log_dir=runs")
    )
    ended = one.command(["make", "run_harness", f"RUN_ARGS={args}"]).end(90).must(DONE)
    assert ended.out.splitlines()[-3].split() == ["test", "status", "samples/s", "exit", "code"]
    for line, scenario in zip(ended.out.splitlines()[-2:], ("Offline", "Server"), strict=True):
        result = json.loads((tmp_path / "runs" / f"dummy-{scenario}" / "result.json").read_text())
        name, status, *doubtful, rate, code = line.split()  # DOUBTFUL on a busy machine
        assert (name, status, rate, code) == (
            f"dummy-{scenario}",
            result["status"],
            f"{result['samples_per_second']:.2f}",
            "0",
        )
        assert doubtful == ["DOUBTFUL"] * bool(result["doubts"])
        assert result["status"] in ("VALID", "INVALID")


def test_the_worst_exit_code_and_the_tests_after_it(one: Starter, tmp_path: Path) -> None:
    """Server fails for want of samples, and the other test runs all the same.

    What an earlier run left in its folder is not its result.
    """
    conf = (
        "*.*.min_duration = 0\n*.Offline.min_query_count = 1\n*.Server.performance_sample_count_override"
        " = 99999\n"
    )
    (tmp_path / "user.conf").write_text(conf)
    (tmp_path / "runs" / "dummy-Server").mkdir(parents=True)
    (tmp_path / "runs" / "dummy-Server" / "result.json").write_text('{"status": "VALID"}')
    ended = one.mpillm(
        "run-harness",
        *DUMMY,
        "--scenarios=Server,Offline",
        "--user_conf=user.conf",
        "--world_size=2",
        "--log_dir=runs",
    )
    server, offline = ended.must(USAGE).out.splitlines()[-2:]
    assert server.split()[-1] == str(USAGE) and "no result" in server
    assert offline.startswith("dummy-Offline")


def test_dry_run_passes_everything_else_on(one: Starter, tmp_path: Path) -> None:
    make_folder(tmp_path)
    options = (
        "--benchmarks=llama2,moe --core-type triton_grpc --triton_grpc_ports=host_0:8001,8002|host_1:8001"
        " --stop_words='[\"a b\"]'"
    )
    ended = (
        one.command(["make", "run_harness", f"RUN_ARGS={options} --world-size 3 --dry_run"]).end().must(DONE)
    )
    first, second = ended.out.splitlines()
    for line, workload in ((first, "llama2-70b"), (second, "mixtral-8x7b")):
        assert (
            " -m mpillm mpirun -n 3 run --core-type triton_grpc"
            " '--triton_grpc_ports=host_0:8001,8002|host_1:8001'"
            " '--stop_words=[\"a b\"]'" in line
        )
        assert (
            f"--scenarios=Offline --benchmarks={workload} --log_dir=mpillm-runs/" in line
            and line.endswith(f"-{workload}-Offline")
        )
