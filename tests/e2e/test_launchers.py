"""Every launcher crossed with every MPI library: N ranks of one world, or exit code 2 and the line that
works, never N runs of one rank."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.helpers.support import DONE, PYTHONS, ROOT, USAGE, Ended, Starter

RUN: list[object] = ["run", "--core_type", "dummy", "--min_query_count", 8]
OF_RANKS: dict[str, list[object]] = {
    "run": RUN,
    "generate-disagg-config": ["generate-disagg-config", "--mode", "disaggregated", "--output", "made.yaml"],
    "worker": ["run-llm-server", "--core_type", "trtllm_disagg", "--disagg_config", "disagg.yaml"],
}
WORKER = {"MLPERF_DISAGG_LAUNCH_TYPE": "worker"}
ALONE: dict[str, list[object]] = {
    "run-harness": ["run-harness", "--core_type", "dummy"],
    "mpirun": ["mpirun", "-n", 2, *RUN],
    "bench": ["bench", "routing"],
    "plan": ["plan", "--world_size", 4],
}
TITLES = {"openmpi": "Open MPI 5", "mpich": "MPICH"}
LAUNCHERS = {"openmpi": "Open MPI's mpirun", "mpich": "MPICH's mpirun (Hydra)"}


@pytest.fixture
def other(mpi: str, mpich: str) -> str:
    """Return the MPI that is not this test's."""
    return {"openmpi": "mpich", "mpich": "openmpi"}[mpi]


def through_a_shell(*words: object) -> list[object]:
    """Return a command line for a rank that tells its exit code, whatever the launcher makes of it."""
    return ["sh", "-c", '"$@"; echo "ended with $?"', "sh", *words]


def check_refusal(
    ended: Ended, launcher: str, library: str, command: list[object], variables: str = ""
) -> list[str]:
    """Check the one message, which names both and shows the line; return the line's words."""
    problem, _, line = ended.message.splitlines()
    assert problem.startswith(f"mpillm: {launcher} started 3 ranks, but the MPI of "), repr(ended)
    assert f", {library}" in problem and problem.endswith(
        "sees a world of 1: they would be 3 separate runs"
    ), repr(ended)
    words = shlex.split(line)
    assert words[-len(command) :] == [str(word) for word in command]
    assert not variables or words[0] == variables
    assert "Traceback" not in ended.err and "RuntimeWarning" not in ended.err
    assert not (ended.log_dir / "result.json").exists()
    return words


@pytest.mark.parametrize("name", OF_RANKS)
def test_the_mpirun_of_another_mpi(both: Starter, other: str, name: str, tmp_path: Path) -> None:
    command = [*OF_RANKS[name], *(["--log_dir", tmp_path / "run"] if name == "run" else [])]
    env = WORKER if name == "worker" else {}
    program = [both.python, "-m", "mpillm", *command]
    # Each rank writes its exit code, and no launcher ends the others: they wait for rank 0 until this file
    # exists.
    exit_file = {"MPILLM_EXIT_FILE": str(tmp_path / "exit_code")}
    ended = both.plain(3, *through_a_shell(*program), python=PYTHONS[other], env=env | exit_file).end()
    assert ended.out.count("ended with 2") == 3, repr(ended)
    check_refusal(ended, LAUNCHERS[other], TITLES[both.mpi], command, "=".join(*env.items()) if env else "")
    assert not (tmp_path / "made.yaml").exists()


def test_a_launcher_that_does_not_tell_how_many(both: Starter, tmp_path: Path) -> None:
    """With PRRTE's own launcher Open MPI finds its ranks, and MPICH knows that it can't."""
    own = Path(PYTHONS["openmpi"]).parent / "prterun"
    prterun = [own, "--personality", "prte", "--map-by", ":oversubscribe", "-n", 2]
    if not own.exists():
        pytest.skip("this Open MPI has no prterun of its own")
    root = {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    ended = both.command(
        [*prterun, both.python, "-m", "mpillm", *RUN, "--log_dir", tmp_path / "run"], env=root
    ).end()
    if both.mpi == "openmpi":
        assert ended.must(DONE).result["world_size"] == 2
    else:
        problem, head, line = ended.must(USAGE).message.splitlines()
        assert problem.startswith("mpillm: PRRTE's prun started this process as rank 0, but the MPI of "), (
            repr(ended)
        )
        assert head.endswith("with the number of ranks for N:") and " mpirun -n N run " in line


def test_the_suggested_command_works(both: Starter, other: str, tmp_path: Path) -> None:
    command = [*RUN, "--log_dir", tmp_path / "run"]
    ended = both.plain(3, both.python, "-m", "mpillm", *command, python=PYTHONS[other]).end().must(USAGE)
    words = check_refusal(ended, LAUNCHERS[other], TITLES[both.mpi], command)
    ended = both.command(words).end().must(DONE)
    assert ended.result["world_size"] == 3 and ended.result["status"] == "VALID"


@pytest.mark.parametrize("name", ALONE)
def test_commands_that_run_as_one_process(one: Starter, name: str) -> None:
    ended = one.plain(3, one.python, "-m", "mpillm", *ALONE[name]).end()
    assert ended.code == USAGE and "Open MPI's mpirun started 3 processes of" in ended.message
    assert f"'{name}', which runs as one: start it once" in ended.message and not ended.out


# srun, as it was seen to set the environment of a task; nothing of Slurm is here.
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "0",
}
PMI2 = {"SLURM_MPI_TYPE": "pmi2", "PMI_JOBID": "7.0", "PMI_RANK": "0", "PMI_SIZE": "3"}
PMIX = {"SLURM_MPI_TYPE": "pmix", "PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.7.0"}


@pytest.mark.parametrize("name", [*OF_RANKS, *ALONE])
def test_srun_without_a_type(both: Starter, name: str) -> None:
    words = (OF_RANKS | ALONE)[name]
    # MPICH may have been built with Slurm's own library, which needs no type: whether a worker's was, only
    # trtllm-serve finds out.
    if (both.mpi, name) == ("mpich", "worker"):
        return
    ended = both.mpillm(*words, env=SRUN | (WORKER if name == "worker" else {})).must(USAGE)
    if name in ALONE:
        assert (
            ended.message
            == f"mpillm: srun started 3 processes of '{name}', which runs as one: start it once\n"
        )
    else:
        line = check_refusal(ended, "srun", TITLES[both.mpi], words)
        kind = {"openmpi": "pmix", "mpich": "pmi2"}[both.mpi]
        assert ["srun", "-n", "3", f"--mpi={kind}", both.python, "-m", "mpillm"] == line[name == "worker" :][
            :7
        ]


@pytest.mark.parametrize(
    ("mpi", "step"), [("openmpi", PMI2), ("mpich", PMIX)], ids=["pmi2", "pmix"], indirect=["mpi"]
)
def test_srun_with_the_type_of_another_mpi(both: Starter, step: dict[str, str]) -> None:
    check_refusal(both.mpillm(*RUN, env=SRUN | step).must(USAGE), "srun", TITLES[both.mpi], RUN)


def test_another_rank_of_srun_is_silent(one: Starter) -> None:
    ended = one.mpillm(*RUN, env=SRUN | {"SLURM_PROCID": "2"}).must(USAGE)
    assert not ended.out and not ended.err


# --- what is right ---

# In a step of one task, of any type, a person starts mpirun; on several nodes mpirun's daemons are a step of
# their own.
TASK = {"SLURM_NTASKS": "3", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}
STEPS = {
    "none": TASK,
    "pmi2": TASK | PMI2 | {"PMI_SIZE": "1"},
    "pmix": TASK | PMIX,
    "daemons": TASK | {"SLURM_STEP_NUM_TASKS": "2"},
}


@pytest.mark.parametrize("step", STEPS)
def test_mpirun_in_a_step_of_srun(both: Starter, step: str, tmp_path: Path) -> None:
    command = both.plain(3, both.python, "-m", "mpillm", *RUN, "--log_dir", tmp_path / "run", env=STEPS[step])
    assert command.end().must(DONE).result["world_size"] == 3


def test_an_mpirun_that_another_mpirun_started(both: Starter, other: str, tmp_path: Path) -> None:
    inner = [
        Path(both.python).parent / "mpirun",
        *(["--oversubscribe"] if both.mpi == "openmpi" else []),
        "-n",
        3,
    ]
    program = [both.python, "-m", "mpillm", *RUN, "--log_dir", tmp_path / "run"]
    ended = both.plain(1, *inner, *program, python=PYTHONS[other]).end().must(DONE)
    assert ended.result["world_size"] == 3


def test_one_rank_of_any_launcher(both: Starter, other: str, tmp_path: Path) -> None:
    """One rank is a world of one, which was asked for."""
    program = [both.python, "-m", "mpillm", *RUN, "--log_dir", tmp_path / "run"]
    ended = both.plain(1, *program, python=PYTHONS[other]).end().must(DONE)
    assert ended.result["world_size"] == 1


def test_mpillm_mpirun_generates_for_its_ranks(both: Starter, tmp_path: Path) -> None:
    options = [
        "--core_type=trtllm_disagg",
        "--num_ctx_servers=1",
        "--num_gen_servers=3",
        "--output=made.yaml",
        "--model_path=llama2-70b",
    ]
    ended = both.mpillm("mpirun", "-n", 4, "generate-disagg-config", *options).must(DONE)
    assert "wrote made.yaml: 4 workers" in ended.out
    assert (tmp_path / "made.yaml").read_text().count("- localhost:") == 4
    wrong = both.mpillm("mpirun", "-n", 3, "generate_disagg_config", *options).must(USAGE)
    assert "need 4 worker ranks, which do not fit; must be 4 (all ranks are workers)" in wrong.message


@pytest.mark.smoke
def test_a_bad_option_is_reported_once(both: Starter) -> None:
    ended = both.mpillm("mpirun", "-n", 3, "generate-disagg-config", "--sede", 1).must(USAGE)
    assert "--sede" in ended.message


@pytest.mark.parametrize("arguments", [["tests/mpi"], ["-n", "2", "tests/mpi"]], ids=["ranks", "starters"])
def test_the_tests_own_entry(arguments: list[str], one: Starter, mpich: str) -> None:
    ended = one.plain(2, sys.executable, ROOT / "tests/under_mpirun.py", *arguments, python=mpich).end()
    assert ended.code == 1 and "MPICH's mpirun (Hydra) started 2 " in ended.err and not ended.out


CHILD = """
import os, sys
from launch.children import Children
program = "import os; from mpi4py import MPI; os.write(1, f'a rank of {MPI.COMM_WORLD.size}\\\\n'.encode())"
with Children() as children:
    sys.exit(children.wait(children.start("child", [sys.executable, "-c", program], os.environ), 50))
"""


def test_a_child_may_take_the_rank_s_place(both: Starter) -> None:
    """A child reaches the mpirun by what its rank inherited, as trtllm-serve's worker does."""
    assert both.plain(2, both.python, "-c", CHILD).end().must(DONE).out.count("a rank of 2") == 2
