"""Slurm job scripts."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from disagg.errors import ConfigError
from launch.sbatch import main
from tests.helpers.support import ROOT

# The sample of the Triton backend's texts for TensorRT-LLM, as it stands there.
SAMPLE = """\
#!/bin/bash
#SBATCH -o logs/tensorrt_llm.out
#SBATCH -e logs/tensorrt_llm.error
#SBATCH -J
#SBATCH -A
#SBATCH -p
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --time=00:30:00

sudo nvidia-smi -lgc 1410,1410

srun --mpi=pmix \\
--container-image triton_trt_llm \\
--container-mounts /path/to/tensorrtllm_backend:/tensorrtllm_backend \\
--container-workdir /tensorrtllm_backend \\
--output logs/tensorrt_llm_%t.out \\
bash /tensorrtllm_backend/tensorrt_llm_triton.sh
"""
OPTIONS = [
    *("-o", "logs/tensorrt_llm.out", "-e", "logs/tensorrt_llm.error", "-J", "", "-A", "", "-p", ""),
    *("--nodes=1", "--ntasks-per-node=8", "--time=00:30:00", "--setup", "sudo nvidia-smi -lgc 1410,1410"),
    *("--container-image", "triton_trt_llm", "--container_workdir", "/tensorrtllm_backend"),
    *("--container_mounts", "/path/to/tensorrtllm_backend:/tensorrtllm_backend"),
    *("--task_output", "logs/tensorrt_llm_%t.out"),
]
BASH = ["--", "bash", "/tensorrtllm_backend/tensorrt_llm_triton.sh"]

# It ends as rank 0 does, whose exit code it leaves; what else srun was given is shown.
SRUN = """\
#!/bin/sh
echo "$@"
[ -z "$TOLD" ] || echo "$TOLD" > "$MPILLM_EXIT_FILE"
exit 137
"""


def written(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words[: words.index("--")], "--dry_run", *words[words.index("--") :]]) == 0
    return capsys.readouterr().out


def test_the_sample_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert written(capsys, *OPTIONS, *BASH).splitlines() == SAMPLE.splitlines()


def test_values_with_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    script = written(
        capsys,
        *("-J", "it's my job", "-o", "my logs/%j.out", "--container_image", "an image", "--nodes", "2"),
        *("--container_mounts", "/data/my dir:/data", "--task_output", "my logs/%t.out", "--", "true"),
    )
    lines = shlex.split(script.replace("\\\n", ""), comments=False)
    assert lines[1:] == [
        *("#SBATCH", "-o", "my logs/%j.out", "#SBATCH", "-J", "it's my job", "#SBATCH", "--nodes=2"),
        *("srun", "--mpi=pmix", "--container-image", "an image", "--container-mounts", "/data/my dir:/data"),
        *("--output", "my logs/%t.out", "true"),
    ]


def test_a_key_is_in_no_script() -> None:
    with pytest.raises(ConfigError, match="set MPILLM_API_KEY in its environment"):
        main(["--", "serve", "--api_key", "sesame"])


@pytest.mark.parametrize(
    "words",
    [
        ["--", "run", "--server_args", "--api-key sesame"],
        ["--", "run", "--server", "command:s {port} --api-key sesame"],
        ["--setup", "export HF_TOKEN=sesame", "--", "run"],
        ["--setup=export LITELLM_MASTER_KEY=sk-sesame", "--", "run"],
        ["--setup=OPENAI_API_KEY=-sesame", "--", "run"],
    ],
)
def test_a_servers_key_is_in_no_script(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the script would show a secret: set it in sbatch's environment"):
        main(["--script", str(tmp_path / "job.sub"), *words])
    assert not (tmp_path / "job.sub").exists()


def test_what_is_left_to_fill_in_is_not_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no value for --job_name, --account, --partition: fill it in"):
        main([*OPTIONS, "--submit", *BASH])
    assert Path("mpillm-runs/job.sub").read_text() == SAMPLE


def test_a_link_is_replaced_and_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "valued").write_text("valued")
    Path("mpillm-runs").mkdir()
    Path("mpillm-runs/job.sub").symlink_to(tmp_path / "valued")
    assert main(["--nodes", "1", "--", "true"]) == 0
    assert (tmp_path / "valued").read_text() == "valued"
    assert "srun" in Path("mpillm-runs/job.sub").read_text() and not Path("mpillm-runs/job.sub").is_symlink()
    assert [file.name for file in Path("mpillm-runs").iterdir()] == ["job.sub"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")
@pytest.mark.parametrize("owned", ["mpillm-runs", "mpillm-runs/job.sub"])
def test_what_another_user_could_replace_is_refused(
    owned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mpillm-runs").mkdir()
    Path("mpillm-runs/job.sub").symlink_to(tmp_path / "valued")
    os.chown(owned, 1002, 1002, follow_symlinks=False)
    with pytest.raises(ConfigError, match=rf"--script mpillm-runs/job\.sub: user 1002 owns {owned};"):
        main(["--nodes", "1", "--", "true"])
    assert not (tmp_path / "valued").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")
@pytest.mark.parametrize("option", ["--output", "--error", "--task_output"])
def test_output_to_a_file_that_another_user_made_is_refused(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.txt").symlink_to(tmp_path / "valued")
    os.chown("job.txt", 1002, 1002, follow_symlinks=False)
    with pytest.raises(ConfigError, match=rf"^sbatch: {option} job\.txt: user 1002 owns it;"):
        main(["--nodes", "1", option, "job.txt", "--", "true"])
    assert not Path("mpillm-runs").exists()
    os.chown(tmp_path, 1002, 1002)  # a shared folder
    assert main(["--nodes", "1", option, "jobs.txt", "--", "true"]) == 0


def test_outputs_that_may_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm replaces %j, and there are folders without write permission."""
    monkeypatch.chdir(tmp_path)
    for name in ("new/job-%j.txt", "%j/job.txt", "/dev/null"):
        assert main(["--nodes", "1", "--output", name, "--", "true"]) == 0


def test_a_script_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--script .*/file/job\.sub: (File exists|Not a directory)"):
        main(["--script", str(tmp_path / "file" / "job.sub"), "--", "true"])


READS = """\
#!/bin/sh
echo "$@" > arguments
cat > submitted
echo 7
"""


def test_slurm_gets_the_text_that_was_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of a folder above the script could replace the file."""
    (tmp_path / "sbatch").write_text(READS)
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    assert main(["--nodes", "1", "--submit", "--", "true"]) == 0
    assert Path("submitted").read_text() == Path("mpillm-runs/job.sub").read_text()
    assert Path("arguments").read_text() == "--parsable --job-name=job.sub\n"


def test_a_folder_that_another_user_made_for_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have links in it, for the exit code and the logs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    main(["--nodes", "1", "--", "run"])
    Path("mpillm-runs/slurm-7-0").mkdir()
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "mpillm-runs/job.sub"], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and "slurm-7-0" in done.stderr


@pytest.mark.parametrize("file_text, code", [("5", 5), ("", 5)])
def test_a_run_has_a_folder_for_each_start_and_rank_0s_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_text: str, code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    main(["--nodes", "2", "--ntasks_per_node", "4", "--gpus_per_node", "h200:8", "--mpi", "pmi2",
          "--log_root", "my runs", "--python", "python3", "--", "run", "--model_path", "a b"])  # fmt: skip
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "TOLD": file_text}
    for restart, folder in ((None, "slurm-7-0"), ("2", "slurm-7-2")):
        more = {} if restart is None else {"SLURM_RESTART_COUNT": restart}
        done = subprocess.run(["bash", "mpillm-runs/job.sub"], env=env | more, capture_output=True, text=True)
        logs = tmp_path / "my runs" / folder
        assert (done.returncode, done.stderr) == (code, "")
        srun, _, command = done.stdout.partition(" python3 -m ")
        assert srun == "--mpi=pmi2 --kill-on-bad-exit=0 --wait=60"
        assert command == f"mpillm run --model_path a b --log_dir {logs}/run\n"
        assert logs.is_dir()
    assert "#SBATCH --gpus-per-node=h200:8\n" in Path("mpillm-runs/job.sub").read_text()


def test_a_harness_is_started_once(capsys: pytest.CaptureFixture[str]) -> None:
    script = written(capsys, "--python=python3", "--", "run-harness", "--scenarios=Offline,Server")
    assert "srun" not in script and "MPILLM_EXIT_FILE" not in script
    last = 'exec python3 -m mpillm run-harness --scenarios=Offline,Server --log_dir "$logs/run"'
    assert script.splitlines()[-1] == last


@pytest.mark.parametrize(
    "words, message",
    [
        (["--container_image", "image", "--", "run-harness"], "without srun"),
        (["--nodes", "2"], "no command to run"),
        (["--", "run", "--log_dir", "here"], "--log_root"),
        (["--", "run", "--log-dir=here"], "--log_root"),
    ],
)
def test_commands_that_cannot_be_a_job(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(words)


@pytest.mark.parametrize("words", [["--nodes", "0"], ["--ntasks", "-2"], ["--nodes", "two"]])
def test_numbers_are_at_least_one(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--", "run"])
    assert words[0] in capsys.readouterr().err


SLURM = """\
#!/bin/sh
case "$0" in
  *sbatch) echo 7 ;;
  *) echo "JobState=RUNNING NodeList=n1 StdOut=/dev/null ExitCode=0:0" ;;
esac
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_wait_reports_that_the_job_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    for name in ("sbatch", "scontrol"):
        (tmp_path / name).write_text(SLURM)
        (tmp_path / name).chmod(0o755)
    line = [sys.executable, "-m", "mpillm", "sbatch", "--nodes", "1", "--wait", "--", "true"]
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(line, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = [process.stderr.readline(), process.stderr.readline()]
        assert lines == ["submitted job 7\n", "job 7: RUNNING on n1\n"]
        process.send_signal(number)
        name = "Ctrl-C" if number == signal.SIGINT else number.name
        assert process.stderr.read() == (
            f"job 7 goes on; end it with: scancel 7\nmpillm: interrupted ({name})\n"
        )
    assert process.returncode == 128 + number


def test_commands_that_start_several_runs_are_started_once(capsys: pytest.CaptureFixture[str]) -> None:
    """They were srun's, as programs of that name."""
    for command in ("find-max-qps", "sweep", "ab", "advise"):
        last = written(capsys, "--python=python3", "--", command, "-n", "3").splitlines()[-1]
        assert last == f'exec python3 -m mpillm {command} -n 3 --log_dir "$logs/run"'


def test_a_command_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match=r"rnu is not a command.*run"):
        main(["--dry_run", "--", "rnu", "--model_path", "a"])
