"""Who started a process, by environments as launchers left them (recorded from real ones), and whether its
MPI agrees."""

from __future__ import annotations

import shlex
import sys

import pytest

from launch import find_mpirun
from launch.check_world import WrongLauncher, check_world, library_title
from launch.environment import clean_environment
from launch.launcher import EveryRankError, Launcher, Protocol, find_launcher, one_of_several, refuse_copies

OPEN_MPI_5 = (
    "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11, repo rev:"
    " v5.0.11rc1, Sep 16, 2026\0"
)
OPEN_MPI_4 = "Open MPI v4.1.6, package: Debian OpenMPI, ident: 4.1.6, repo rev: v4.1.6, Sep 30, 2023\0"
MPICH = (
    "MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25 2026\nMPICH configure:   "
    " --with-device=ch4:ucx --with-pm=hydra:gforker\n"
)
MPICH_PMIX = MPICH.replace("--with-pm=hydra:gforker", "--with-pmix=/usr --with-pm=none")
INTEL = "Intel(R) MPI Library 2021.9 for Linux* OS\n"

HYDRA = {
    "PMI_FD": "9",
    "PMI_RANK": "1",
    "PMI_SIZE": "3",
    "PMI_HOSTNAME": "a",
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "3",
}
OMPI = {
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_RANK": "1",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "prterun-a-8@1",
    "PRTE_LAUNCHED": "1",
}
OMPI_4 = {
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_RANK": "1",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "274726913",
}
ONE_OMPI = OMPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}
PRUN = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prte-a-9@2", "PRTE_LAUNCHED": "1"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3", "SLURM_JOB_NUM_NODES": "2"}
BATCH_SCRIPT = BATCH | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SRUN = BATCH | {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}
SRUN_PMI2 = SRUN | {
    "SLURM_MPI_TYPE": "pmi2",
    "PMI_FD": "11",
    "PMI_JOBID": "5.0",
    "PMI_RANK": "1",
    "PMI_SIZE": "3",
}
SRUN_PMIX = SRUN | {"SLURM_MPI_TYPE": "pmix", "PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.22.0"}
ONE_TASK = SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
ONE_TASK_PMI2 = ONE_TASK | {"PMI_FD": "5", "PMI_JOBID": "5.0", "PMI_RANK": "0", "PMI_SIZE": "1"}
ONE_TASK_PMIX = ONE_TASK | {"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.35.0"}
# An mpirun starts its daemons with srun, on 2 of the job's nodes; a shell of a person has a terminal.
DAEMON = BATCH | {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
SHELL = BATCH | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "16", "SLURM_PTY_PORT": "44325"}
FLUX = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "3", "PMI_FD": "6", "PMI_RANK": "1", "PMI_SIZE": "3"}
GFORKER = {"PMI_FD": "8", "PMI_RANK": "1", "PMI_SIZE": "3", "MPI_APPNUM": "0"}
PORT = {"PMI_PORT": "a:41743", "PMI_ID": "1", "MPI_LOCALNRANKS": "3"}


@pytest.mark.parametrize(
    "env, expected",
    [
        ({}, None),
        (BATCH, None),
        (BATCH_SCRIPT, None),
        (HYDRA, ("MPICH's mpirun (Hydra)", 3, 1, "PMI")),
        (PORT, ("MPICH's mpirun (Hydra)", None, 1, "PMI")),
        (OMPI, ("Open MPI's mpirun", 3, 1, "PMIx")),
        (OMPI_4, ("Open MPI's mpirun", 3, 1, "PMIx")),
        (ONE_OMPI, ("Open MPI's mpirun", 1, 0, "PMIx")),
        (PRUN, ("PRRTE's prun", None, 1, "PMIx")),
        (SRUN, ("srun", 3, 1, "")),
        (SRUN_PMI2, ("srun", 3, 1, "PMI")),
        (SRUN_PMIX, ("srun", 3, 1, "PMIx")),
        (ONE_TASK, ("srun", 1, 0, "")),
        (SHELL, ("srun", 16, 0, "")),
        (FLUX, ("Flux", 3, 1, "PMI")),
        (GFORKER, ("A PMI launcher", 3, 1, "PMI")),
        ({"PMIX_RANK": "0"}, ("A PMIx launcher", None, 0, "PMIx")),
        # One inside another: the inner one counts.
        (BATCH_SCRIPT | OMPI, ("Open MPI's mpirun", 3, 1, "PMIx")),
        (BATCH_SCRIPT | HYDRA, ("MPICH's mpirun (Hydra)", 3, 1, "PMI")),
        (DAEMON | OMPI, ("Open MPI's mpirun", 3, 1, "PMIx")),
        (DAEMON | HYDRA, ("MPICH's mpirun (Hydra)", 3, 1, "PMI")),
        (DAEMON | PRUN, ("PRRTE's prun", None, 1, "PMIx")),
        (SHELL | OMPI, ("Open MPI's mpirun", 3, 1, "PMIx")),
        (ONE_TASK | HYDRA, ("MPICH's mpirun (Hydra)", 3, 1, "PMI")),
        (ONE_TASK_PMI2 | HYDRA, ("MPICH's mpirun (Hydra)", 3, 1, "PMI")),
        (ONE_TASK_PMI2 | OMPI, ("Open MPI's mpirun", 3, 1, "PMIx")),
        (ONE_TASK_PMIX | HYDRA, ("MPICH's mpirun (Hydra)", 3, 1, "PMI")),
        (ONE_OMPI | HYDRA, ("MPICH's mpirun (Hydra)", 3, 1, "PMI")),
        (HYDRA | {"PMI_SIZE": "1", "PMI_RANK": "0"} | OMPI, ("Open MPI's mpirun", 3, 1, "PMIx")),
    ],
)
def test_who_started_a_process(
    env: dict[str, str], expected: tuple[str, int | None, int, Protocol] | None
) -> None:
    assert find_launcher(env) == (Launcher(*expected, is_srun=expected[0] == "srun") if expected else None)
    assert find_launcher(clean_environment(env)) is None  # nor does a child take itself for its rank
    assert one_of_several(env) == (None if expected is None or expected[1] == 1 else find_launcher(env))


@pytest.mark.parametrize(
    "env, library",
    [
        ({}, OPEN_MPI_5),
        (BATCH_SCRIPT, MPICH),
        (HYDRA, MPICH),
        (HYDRA, INTEL),
        (OMPI, OPEN_MPI_5),
        (OMPI_4, OPEN_MPI_4),
        (OMPI, MPICH_PMIX),
        (PRUN, OPEN_MPI_5),
        (SRUN_PMIX, OPEN_MPI_5),
        (SRUN_PMI2, MPICH),
        (SRUN_PMI2, OPEN_MPI_4),  # built for it
        (SRUN, MPICH),  # with Slurm's own libpmi
        (DAEMON | OMPI, OPEN_MPI_5),
        (DAEMON | HYDRA, MPICH),
        (ONE_TASK_PMIX | HYDRA, MPICH),
        (FLUX, MPICH),
    ],
)
def test_the_right_launcher(env: dict[str, str], library: str) -> None:
    check_world(library, None, ["run"], env)
    launcher = find_launcher(env)
    check_world(library, (3, launcher.rank or 0) if launcher else (1, 0), ["run"], env)


@pytest.mark.parametrize(
    "env", [ONE_OMPI, ONE_TASK, ONE_TASK_PMI2, ONE_TASK_PMIX], ids=["mpirun", "srun", "pmi2", "pmix"]
)
@pytest.mark.parametrize("library", [OPEN_MPI_5, MPICH])
def test_one_rank_is_a_world_with_any_launcher(env: dict[str, str], library: str) -> None:
    check_world(library, None, ["run"], env)
    check_world(library, (1, 0), ["run"], env)
    check_world(library, (4, 0), ["run"], env)  # of a launcher inside it that we don't know


@pytest.mark.parametrize(
    "env, library, certain",
    [
        (HYDRA, OPEN_MPI_5, True),
        (HYDRA, OPEN_MPI_4, False),
        (PORT, OPEN_MPI_5, True),
        (OMPI, MPICH, True),
        (OMPI, INTEL, False),
        (PRUN, MPICH, True),
        (PRUN, INTEL, False),
        (SRUN, OPEN_MPI_5, True),
        (SRUN, OPEN_MPI_4, False),
        (SRUN, MPICH, False),
        (SRUN_PMI2, OPEN_MPI_5, True),
        (SRUN_PMIX, MPICH, True),
        (SRUN_PMIX, OPEN_MPI_5, False),  # of another PMIx version than Slurm's
        (SHELL, OPEN_MPI_5, True),
        (DAEMON | HYDRA, OPEN_MPI_5, True),
        (ONE_OMPI | HYDRA, OPEN_MPI_5, True),
        (FLUX, OPEN_MPI_5, True),
        (GFORKER, OPEN_MPI_5, True),
    ],
)
def test_the_wrong_launcher(env: dict[str, str], library: str, certain: bool) -> None:
    """Every rank notices it: before MPI starts where that is sure to fail, else by the size of the world."""
    with pytest.raises(WrongLauncher, match="sees a world of 1: "):
        check_world(library, (1, 0), ["run"], env)
    if certain:
        with pytest.raises(WrongLauncher, match="sees a world of 1: "):
            check_world(library, None, ["run"], env)
    else:
        check_world(library, None, ["run"], env)


def test_variables_without_a_launcher_are_named() -> None:
    with pytest.raises(
        WrongLauncher, match="PMI_RANK and PMI_SIZE are left over from another program: unset"
    ):
        check_world(MPICH, (1, 0), ["run"], {"PMI_RANK": "0", "PMI_SIZE": "4"})


def test_a_part_of_the_ranks_is_no_world_either() -> None:
    with pytest.raises(
        WrongLauncher, match=r"srun started 3 ranks, but the MPI of .*, MPICH 5.0.2, sees a world of 2"
    ):
        check_world(MPICH, (2, 1), ["run"], SRUN_PMI2)


@pytest.mark.parametrize(
    "env, library, head, words",
    [
        (HYDRA, OPEN_MPI_5, "this line starts one world", ["{mpillm}", "mpirun", "-n", "3"]),
        (OMPI, MPICH, "this line starts one world", ["{mpillm}", "mpirun", "-n", "3"]),
        (
            PRUN,
            MPICH,
            "this line starts one world, with the number of ranks for N",
            ["{mpillm}", "mpirun", "-n", "N"],
        ),
        (
            SRUN,
            OPEN_MPI_5,
            "this line starts one world, if `srun --mpi=list` has pmix",
            ["srun", "-n", "3", "--mpi=pmix", "{mpillm}"],
        ),
        (
            SRUN_PMI2,
            OPEN_MPI_5,
            "this line starts one world, if `srun --mpi=list` has pmix",
            ["srun", "-n", "3", "--mpi=pmix", "{mpillm}"],
        ),
        (
            SRUN,
            MPICH,
            "this line starts one world, if `srun --mpi=list` has pmi2",
            ["srun", "-n", "3", "--mpi=pmi2", "{mpillm}"],
        ),
        (
            SRUN_PMIX,
            MPICH,
            "this line starts one world, if `srun --mpi=list` has pmi2",
            ["srun", "-n", "3", "--mpi=pmi2", "{mpillm}"],
        ),
        (
            SRUN_PMIX,
            OPEN_MPI_5,
            "in an allocation (salloc, sbatch) this line starts one world",
            ["{mpillm}", "mpirun", "-n", "3"],
        ),
    ],
)
def test_rank_0_shows_the_line_that_works(
    env: dict[str, str], library: str, head: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find_mpirun, "detect", lambda: None)
    command = ["run", "--core_options", "a:1,b:2", "--log_dir", "my run"]
    first = {name: "0" if name.endswith(("_RANK", "_PROCID")) else value for name, value in env.items()}
    with pytest.raises(WrongLauncher) as error:
        check_world(library, (1, 0) if "-n 3" in " ".join(words) else None, command, first, {"A": "b c"})
    problem, heading, line = str(error.value).split("\n")
    assert problem == error.value.problem and heading == f"  {head}:"
    expected = [
        part
        for word in words
        for part in ([sys.executable, "-m", "mpillm"] if word == "{mpillm}" else [word])
    ]
    assert shlex.split(line) == ["A=b c", *expected, *command]
    with pytest.raises(WrongLauncher) as error:
        check_world(library, (1, 0), command, env)
    assert "\n" not in str(error.value)  # another rank reports nothing, and looks for no mpirun


def test_without_a_fitting_mpirun_the_error_suggests_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def detect() -> None:
        raise EveryRankError("no mpirun here; install one")

    monkeypatch.setattr(find_mpirun, "detect", detect)
    with pytest.raises(WrongLauncher, match=r"separate runs\n  no mpirun here; install one$"):
        check_world(OPEN_MPI_5, None, ["run"], HYDRA | {"PMI_RANK": "0"})


@pytest.mark.parametrize(
    "library, title",
    [
        (OPEN_MPI_5, "Open MPI 5.0.11"),
        (OPEN_MPI_4, "Open MPI 4.1.6"),
        (MPICH, "MPICH 5.0.2"),
        (INTEL, "Intel(R) MPI Library 2021.9 for Linux* OS"),
        ("\0", "an unnamed MPI"),
    ],
)
def test_titles(library: str, title: str) -> None:
    assert library_title(library) == title


@pytest.mark.parametrize("env", [HYDRA, OMPI, SRUN, SRUN_PMI2, FLUX])
def test_what_runs_as_one_process_is_not_started_several_times(env: dict[str, str]) -> None:
    with pytest.raises(
        EveryRankError, match=r"started 3 processes of 'plan', which runs as one: start it once"
    ):
        refuse_copies("plan", env)


@pytest.mark.parametrize("env", [{}, BATCH_SCRIPT, ONE_TASK, ONE_OMPI, SHELL, PRUN])
def test_and_once_it_is(env: dict[str, str]) -> None:
    refuse_copies("plan", env)
