"""The environment of child processes, and the exit code that rank 0 leaves."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

from disagg.errors import ConfigError
from launch import guard, server_guard
from launch.environment import (
    EXIT_FILE,
    LAUNCH_TYPE,
    TTY,
    clean_environment,
    drop_launch_type,
    environment_of_this_node,
    let_rank_0_report,
    mpirun_ends_ranks,
    note_warning,
    rank_environment,
    read_absent,
    read_exit_code,
    read_signal,
    read_started,
    write_absent,
    write_exit_code,
    write_signal,
    write_started,
)
from launch.signals import stop_signals, title
from tests.helpers.full_disk import files_of_at_most

PERSON = {
    "PATH": "/bin",
    "HOME": "/home/a",
    "OMPI_MCA_btl": "self,tcp",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "PMIX_MCA_gds": "hash",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "HYDRA_IFACE": "eth0",
    "MPIR_CVAR_CH4_NETMOD": "ofi",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "4",
}

OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_MCA_PREFIXES": "mca,opal",
    "OMPI_MCA_cpu_type": "x86_64",
    "OMPI_MCA_initial_wdir": "/",
    "OMPI_MCA_num_procs": "4",
    "OMPI_MCA_mpi_ft_enable": "1",
    "OMPI_VERSION": "5.0.11",
    "PMIX_RANK": "0",
    "PMIX_NAMESPACE": "prterun-vm-1@1",
    "PMIX_SERVER_URI41": "prterun-vm-1@0.0;tcp4://127.0.0.1:1",
    "PRTE_LAUNCHED": "1",
}

OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_MCA_ess": "^singleton",
    "OMPI_MCA_ess_base_jobid": "1",
    "OMPI_MCA_orte_hnp_uri": "1.0;tcp://192.0.2.2:1",
    "OMPI_MCA_orte_launch": "1",
    "OMPI_MCA_mpi_oversubscribe": "0",
    "OMPI_MCA_pmix": "^s1,s2",
    "PMIX_RANK": "0",
}

MPICH = {
    "PMI_RANK": "0",
    "PMI_FD": "9",
    "PMI_SIZE": "2",
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALRANKID": "0",
    "MPI_LOCALNRANKS": "2",
}

SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_SRUN_COMM_PORT": "1",
    "SLURM_PMIX_MAPPING": "",
}


@pytest.mark.parametrize(
    "job", [OPEN_MPI_5, OPEN_MPI_4, MPICH, SLURM], ids=["openmpi5", "openmpi4", "mpich", "slurm"]
)
def test_what_a_launcher_set_goes_and_what_a_person_set_stays(job: dict[str, str]) -> None:
    # What a step starts through Slurm would wait for the step's own end.
    steps = {"SLURM_OVERLAP": "1"} if job is SLURM else {}
    assert clean_environment({**PERSON, **job}) == PERSON | steps


def test_outside_a_job_nothing_changes() -> None:
    env = {
        **PERSON,
        "OPAL_PREFIX": "/opt/moved",
        "LD_LIBRARY_PATH": "/opt/moved/lib",
        "OMPI_MCA_pmix": "ext3x",
    }
    assert clean_environment(env) == env


def test_the_library_folder_that_mpirun_added_goes() -> None:
    env = {**OPEN_MPI_5, "OPAL_PREFIX": "/venv", "LD_LIBRARY_PATH": "/venv/lib:/venv/lib:/mine"}
    assert clean_environment(env) == {"LD_LIBRARY_PATH": "/mine"}
    assert clean_environment({**env, "LD_LIBRARY_PATH": "/venv/lib"}) == {}


def test_a_child_does_not_write_our_exit_file() -> None:
    assert clean_environment({EXIT_FILE: "/tmp/x", TTY: "1"}) == {}


def test_ranks_get_the_exit_file_and_are_unbuffered() -> None:
    env = rank_environment({**PERSON, **OPEN_MPI_5, TTY: "1"}, Path("/tmp/x"), tty=False)
    assert env == {**PERSON, EXIT_FILE: "/tmp/x", "PYTHONUNBUFFERED": "1"}
    assert rank_environment({}, Path("/tmp/x"), tty=True)[TTY] == "1"


def test_an_exit_code_is_written_once_and_whole(tmp_path: Path) -> None:
    file = tmp_path / "exit_code"
    assert read_exit_code(file) is None
    write_exit_code(4, {EXIT_FILE: str(file)})
    assert read_exit_code(file) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["exit_code"]


def test_rank_0_reports_that_it_runs(tmp_path: Path) -> None:
    file = tmp_path / "exit_code"
    for env in ({}, {"OMPI_COMM_WORLD_RANK": "1"}, {"PMI_RANK": "2"}):
        write_started({EXIT_FILE: str(file), **env})
        assert not read_started(file)
    write_started({EXIT_FILE: str(file), "PMI_RANK": "0"})
    assert read_started(file) and read_exit_code(file) is None
    with pytest.raises(ConfigError, match="rank 0 is on a host that does not see this folder"):
        write_started({EXIT_FILE: str(tmp_path / "elsewhere" / "exit_code"), "PMI_RANK": "0"})


def test_without_a_launcher_nothing_is_reported() -> None:
    write_started({"PMI_RANK": "0"})
    write_exit_code(4, {})


def test_the_launchers_signal_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "exit_code"
    assert read_signal({EXIT_FILE: str(file)}) is None and read_signal({}) is None
    write_signal(signal.SIGINT, file)
    assert read_signal({EXIT_FILE: str(file)}) == signal.SIGINT
    assert read_signal({EXIT_FILE: str(tmp_path / "elsewhere" / "exit_code")}) is None
    assert (title(signal.SIGINT), title(signal.SIGTERM)) == ("Ctrl-C", "SIGTERM")


def test_a_ranks_warning_signal_is_noted_for_the_launcher(tmp_path: Path) -> None:
    env = {EXIT_FILE: str(tmp_path / "exit_code")}
    note_warning(signal.SIGTERM, env)  # Open MPI's mpirun sends it after any loss
    note_warning(signal.SIGUSR1, {})
    assert read_signal(env) is None
    note_warning(signal.SIGUSR1, env)
    note_warning(signal.SIGUSR2, env)  # by the launcher, which got the first
    assert read_signal(env) == signal.SIGUSR1


def test_a_full_disk_does_not_keep_the_launcher_from_ending_the_ranks_in_order(tmp_path: Path) -> None:
    """Such as after Ctrl-C: the launcher then sends the ranks the signal."""
    file = tmp_path / "exit_code"
    with files_of_at_most(0):
        write_signal(signal.SIGINT, file)
        write_absent("rank 1", file)
    assert read_signal({EXIT_FILE: str(file)}) is None and read_absent({EXIT_FILE: str(file)}) == ""


ALWAYS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR2}
OPEN_MPI_RANK = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
HYDRA_RANK = {"HYDI_CONTROL_FD": "5", "PMI_RANK": "1", "PMI_SIZE": "2"}


@pytest.mark.parametrize("env", [{}, OPEN_MPI_RANK, {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}])
def test_a_batch_systems_warning_stops_a_process(env: dict[str, str]) -> None:
    assert {*stop_signals(env)} - {signal.SIGHUP} == ALWAYS | {signal.SIGUSR1}


def test_hydras_notice_of_a_lost_rank_does_not_stop_the_others() -> None:
    assert {*stop_signals(HYDRA_RANK)} - {signal.SIGHUP} == ALWAYS


def test_programs_run_by_path_survive_the_stop_signals() -> None:
    """They import nothing of ours, so they have a list of their own."""
    assert {*stop_signals({})} <= {*server_guard.HANDLED}
    assert {*stop_signals(HYDRA_RANK)} <= {*guard.FORWARDED_BY_HYDRA}


def test_another_rank_waits_until_rank_0_has_reported(tmp_path: Path) -> None:
    env = {EXIT_FILE: str(tmp_path / "exit_code")}
    let_rank_0_report(env, max_s=0.1)
    rank_0 = threading.Timer(0.2, write_exit_code, (2, env))
    rank_0.start()
    began = time.monotonic()
    let_rank_0_report(env, max_s=600)
    assert time.monotonic() - began < 60 and read_exit_code(tmp_path / "exit_code") == 2


@pytest.mark.parametrize(
    "env, expected",
    [(OPEN_MPI_5, True), (OPEN_MPI_5 | {EXIT_FILE: "/tmp/x"}, False), (MPICH, False), ({}, False)],
)
def test_whose_mpirun_drops_what_its_ranks_print(env: dict[str, str], expected: bool) -> None:
    assert mpirun_ends_ranks(env) is expected


def test_a_launch_type_that_nothing_reads_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LAUNCH_TYPE, "WORKER")
    drop_launch_type("run")
    drop_launch_type("run")
    assert capsys.readouterr().err == (
        "mpillm: note: the environment variable MLPERF_DISAGG_LAUNCH_TYPE=WORKER has no effect on run:"
        " only run-llm-server reads it, for the servers of a disaggregation YAML\n"
    )
    monkeypatch.setenv(LAUNCH_TYPE, "WORKER")
    monkeypatch.setenv("PMI_RANK", "1")
    drop_launch_type("run")
    assert not capsys.readouterr().err


def test_an_exit_code_that_cannot_be_written_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a full disk, rank 0 must still stop the other ranks."""
    file = tmp_path / "gone" / "exit_code"
    write_exit_code(4, {EXIT_FILE: str(file)})
    error = capsys.readouterr().err
    assert error == f"mpillm: exit code 4 can't be written: {file}: No such file or directory\n"


@pytest.mark.parametrize(
    "cpus, each, tasks",
    [
        ("1(x2)", None, "1(x2)"),
        ("72(x2),36", "4", "18(x2),9"),
        ("3,1", "2", "1,1"),
        ("128(x12)", "1", "128(x12)"),
    ],
)
def test_a_step_of_one_node_shows_the_whole_allocation(cpus: str, each: str | None, tasks: str) -> None:
    """Open MPI's mpirun reads nodes and tasks there."""
    env = {
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NNODES": "1",
        "SLURM_TASKS_PER_NODE": "1",
        "SLURM_JOB_CPUS_PER_NODE": cpus,
    } | ({"SLURM_CPUS_PER_TASK": each} if each else {})
    clean = clean_environment(env)
    assert (clean["SLURM_NNODES"], clean["SLURM_TASKS_PER_NODE"]) == ("3", tasks)
    whole = clean_environment(env | {"SLURM_STEP_NUM_NODES": "3"})
    assert (whole["SLURM_NNODES"], whole["SLURM_TASKS_PER_NODE"]) == ("1", "1")


def test_a_process_that_stays_on_this_node_does_not_see_the_job() -> None:
    """Where it did, the mpirun of a server that a rank owns spread its ranks over the job's nodes."""
    job = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "h[1-2]", "PBS_NODEFILE": "/n"}
    job |= {"SLURM_TASKS_PER_NODE": "2,1", "LSB_HOSTS": "h1 h2", "PE_HOSTFILE": "/hosts"}
    left = environment_of_this_node({**PERSON, **job})
    assert left == {name: value for name, value in PERSON.items() if "SLURM" not in name}
