"""Cores that are no part of mpillm run like its own: by class, by entry point, by registration."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.support import DONE, NOT_READY, ROOT, USAGE, Ended, Samples, Starter

HERE = str(Path(__file__).parent)

# Registers the core under a name of its own, then is `python -m mpillm`.
START = """
import sys
from mpillm.cli import main
from mpillm.cores.registry import BackendRegistry
BackendRegistry.register("echo", "tests.helpers.plugin_cores:Echo")
sys.exit(main(sys.argv[1:]))
"""
LAUNCH = """
import sys
from launch.mpirun import main
sys.exit(main(sys.argv[2:], program=[sys.executable, sys.argv[1]]))
"""


def check(ended: Ended, samples: Samples) -> None:
    ended.must(DONE)
    assert sorted(line["index"] for line in ended.outputs()) == list(range(len(samples.prompts)))
    for line in ended.outputs():
        assert line["output_tokens"] == samples.prompts[line["index"]][::-1][:4]


def test_a_core_by_module_and_class(both: Starter, samples: Samples) -> None:
    options = ["--dataset_path", samples.path, "--max_output_len", 4, "--save_outputs"]
    ended = both.run(5, *options, core="tests.helpers.plugin_cores:Echo", env={"PYTHONPATH": str(ROOT)})
    check(ended, samples)
    assert ended.result["core_type"] == "tests.helpers.plugin_cores:Echo"


def test_the_example_core(one: Starter, samples: Samples) -> None:
    options = ["--dataset_path", samples.path, "--max_output_len", 4, "--save_outputs"]
    check(
        one.run(3, *options, core="echo_core:EchoCore", env={"PYTHONPATH": f"{ROOT / 'examples'}:{ROOT}"}),
        samples,
    )
    assert len((ROOT / "examples/echo_core.py").read_text().splitlines()) <= 60


def test_a_core_by_entry_point(one: Starter, samples: Samples, tmp_path: Path) -> None:
    package = tmp_path / "echo-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: echo\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[mpillm.cores]\necho = echo_core:EchoCore\n")
    options = ["--dataset_path", samples.path, "--max_output_len", 4, "--save_outputs"]
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT / 'examples'}:{ROOT}"}
    check(one.run(3, *options, core="echo", env=env), samples)
    assert "did you mean" in one.run(3, core="ecko", env=env).must(USAGE).message


def test_a_core_by_registered_name(one: Starter, samples: Samples, tmp_path: Path) -> None:
    start = tmp_path / "start.py"
    start.write_text(START)
    options = [
        "--dataset_path",
        samples.path,
        "--max_output_len",
        4,
        "--save_outputs",
        "--log_dir",
        tmp_path / "run",
    ]
    line = [one.python, "-c", LAUNCH, start, "-n", 3, "run", "--core_type", "echo", *options]
    check(one.command(line, env={"PYTHONPATH": str(ROOT)}).end(), samples)


def test_a_missing_module(one: Starter) -> None:
    for core, word in (
        ("no_such_module:Core", "no_such_module"),
        ("tests.helpers.plugin_cores:Ecko", "Ecko"),
        ("tests.helpers.support:Ended", "not an LLMCore"),
    ):
        ended = one.run(2, core=core, env={"PYTHONPATH": str(ROOT)}).must(USAGE)
        assert core in ended.message
        assert word in ended.message


def test_a_core_whose_module_imports_mpi4py_does_not_start_mpi(
    both: Starter, samples: Samples, tmp_path: Path
) -> None:
    """MPI would start without the settings of mpillm, for example over Docker's bridge, and hang."""
    (tmp_path / "with_mpi.py").write_text(
        "import sys\n"
        "assert 'mpi4py.MPI' in sys.modules\n"
        "from mpi4py import MPI\n"
        "assert MPI.Is_initialized() and MPI.Query_thread() == MPI.THREAD_MULTIPLE\n"
        "RANKS = MPI.COMM_WORLD.size\n"
        "from tests.helpers.plugin_cores import Echo\n"
    )
    options = ["--dataset_path", samples.path, "--max_output_len", 4, "--save_outputs"]
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    check(both.run(3, *options, core="with_mpi:Echo", env=env), samples)


def test_a_core_whose_import_fails_on_one_rank(both: Starter, tmp_path: Path) -> None:
    (tmp_path / "licensed.py").write_text(
        "from mpi4py import MPI\n"
        "if MPI.COMM_WORLD.rank == 1:\n"
        "    raise RuntimeError('no licence here')\n"
        "from tests.helpers.plugin_cores import Echo\n"
    )
    ended = both.run(3, core="licensed:Echo", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    message = ended.must(NOT_READY).message
    assert "rank 1: RuntimeError: no licence here" in message and "licensed.py" in message


@pytest.mark.parametrize("rank, where", [(0, r"on rank 0 \(pid \d+\) on \S+"), (1, "on another rank")])
def test_a_core_whose_import_hangs(both: Starter, tmp_path: Path, rank: int, where: str) -> None:
    """The deadline of MPI's start holds for it."""
    (tmp_path / "hanging.py").write_text(
        "import time\n"
        "from mpi4py import MPI\n"
        f"if MPI.COMM_WORLD.rank == {rank}:\n"
        "    time.sleep(600)\n"
        "from tests.helpers.plugin_cores import Echo\n"
    )
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ended = both.run(2, "--join_deadline", 8, core="hanging:Echo", env=env)
    text = rf"the import of the core's module \(--core_type\) has not ended {where}"
    assert re.search(text, ended.must(NOT_READY).message), ended
