"""A submitted Slurm job that is followed."""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.errors import ConfigError
from launch import follow_job
from launch.follow_job import follow, run_slurm


def test_a_silent_sbatch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = tmp_path / "sbatch"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ConfigError, match=r"sbatch --parsable --job-name=job\.sub: no answer within 0\.2 s"):
        run_slurm("sbatch", "--parsable", "--job-name=job.sub", max_s=0.2)


SLOW_END = """\
#!/bin/sh
echo x >> "$COUNT"
case $(wc -l < "$COUNT") in
  1) echo "JobState=RUNNING NodeList=h[1-2] StdOut=/dev/null ExitCode=0:0" ;;
  2) echo "JobState=COMPLETING NodeList=h[1-2] StdOut=/dev/null ExitCode=5:0" ;;
  [3-9]) echo "JobState=COMPLETING NodeList=h2 StdOut=/dev/null ExitCode=5:0" ;;
  *) echo "JobState=$LAST NodeList=h2 StdOut=/dev/null ExitCode=5:0" ;;
esac
"""


@pytest.mark.parametrize("last", ["COMPLETING", "FAILED"])
def test_a_job_that_slurm_keeps_completing_is_named_with_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], last: str
) -> None:
    """A node without its slurmd confirms nothing, and `--wait` followed the job for ever."""
    (tmp_path / "scontrol").write_text(SLOW_END)
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("COUNT", str(tmp_path / "count"))
    monkeypatch.setenv("LAST", last)
    clock = iter(range(0, 10_000, 20))  # seconds: one look in 20
    assert follow("7", poll_s=0.0, clock=lambda: next(clock)) == 5
    running, completing, *warning, end = capsys.readouterr().err.splitlines()
    assert running == "job 7: RUNNING on h[1-2]"
    assert completing == "job 7: COMPLETING"
    assert warning[0] == "job 7: COMPLETING for 60 s: Slurm waits for h2 to confirm the end"
    assert warning[2] == "  look at: scontrol show node h2" and warning[4] == "  followed for 540 s more"
    assert warning[3].endswith("scontrol update nodename=h2 state=down reason=slurmd")
    if last == "FAILED":
        assert end == "job 7: FAILED"
    else:
        assert end.startswith("job 7: COMPLETING for 600 s: Slurm waits for h2 to confirm the end; ")
        assert end.endswith("; no longer followed, exit code 5")


@pytest.mark.parametrize(
    ("output", "code"),
    [
        ("JobState=COMPLETED ExitCode=0:0", 0),
        ("JobState=COMPLETING Reason=None ExitCode=0:0", 0),
        ("JobState=COMPLETING Reason=NonZeroExitCode ExitCode=5:0", 5),
        ("JobState=COMPLETING Reason=TimeLimit ExitCode=0:0", 1),
        ("JobState=FAILED ExitCode=3:0", 3),
        ("JobState=FAILED ExitCode=0:9", 137),
        ("JobState=CANCELLED ExitCode=0:0", 1),
        ("JobState=NODE_FAIL", 1),
        ("JobState=COMPLETED ExitCode=\u00b2:x", 0),
    ],
)
def test_the_exit_code_of_a_job(output: str, code: int) -> None:
    assert follow_job._exit_code(follow_job._read_job(output)) == code


@pytest.mark.parametrize("output", ["", "slurm_load_jobs error: Invalid job id specified", "JobState= A=b"])
def test_output_without_a_state(output: str) -> None:
    with pytest.raises(ConfigError, match=r"scontrol show job: expected JobState=…"):
        follow_job._read_job(output)


# Slurm does not answer in the looks of FAILS, which is a pattern of numbers.
OUTAGE = """\
#!/bin/sh
echo x >> "$COUNT"
n=$(wc -l < "$COUNT")
if expr "$n" : "$FAILS\\$" > /dev/null; then
  echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2
  exit 1
fi
case $n in
  [1-4]) echo "JobState=RUNNING NodeList=h1 StdOut=/dev/null ExitCode=0:0" ;;
  *) echo "JobState=FAILED NodeList=h1 StdOut=/dev/null ExitCode=3:0" ;;
esac
"""


@pytest.mark.parametrize("fails", ["[23]", "[2-9][0-9]*"])
def test_a_controller_that_does_not_answer_for_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails: str
) -> None:
    """It is restarted, or replaced."""
    (tmp_path / "scontrol").write_text(OUTAGE)
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("COUNT", str(tmp_path / "count"))
    monkeypatch.setenv("FAILS", fails)
    clock = iter(range(0, 10_000, 100))
    code = follow("7", poll_s=0.0, clock=lambda: next(clock))
    first, second, *others = capsys.readouterr().err.splitlines()
    why = "job 7: scontrol show job --oneliner 7: slurm_load_jobs error: Unable to contact slurm controller"
    assert first == "job 7: RUNNING on h1"
    assert second == f"{why} (connect failure); trying again for 600 s"
    if fails == "[23]":
        assert (code, others) == (3, ["job 7: FAILED"])
    else:
        end = [f"{why} (connect failure); no longer followed", "job 7 goes on; end it with: scancel 7"]
        assert (code, others) == (1, end)


def test_values_with_spaces() -> None:
    output = "JobId=7 JobName=my job JobState=RUNNING ReqB:S:C:T=0:0:*:* StdOut=/my runs/a=b.out Power= A=1\n"
    job = follow_job._read_job(output)
    assert job["StdOut"] == "/my runs/a=b.out" and job["JobName"] == "my job"
    assert (job["JobState"], job["ReqB:S:C:T"], job["Power"], job["A"]) == ("RUNNING", "0:0:*:*", "", "1")


class Growing(io.BytesIO):
    """Grows each time after its length was read."""

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = super().seek(offset, whence)
        if whence == os.SEEK_END:
            self.write(b"more\n")
        return at

    def close(self) -> None:
        pass  # opened again


def test_each_part_of_the_output_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    file = Growing(b"begin\n")
    path: Any = SimpleNamespace(open=lambda mode: file)
    output = follow_job._Output()
    output.print_new(path, final=False)
    output.print_new(path, final=True)
    assert capsys.readouterr().out == "begin\nmore\nmore\n"


def test_a_character_that_is_written_in_two_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = tmp_path / "out", follow_job._Output()
    for data in (b"caf\xc3", b"caf\xc3\xa9 \xe2"):
        path.write_bytes(data)
        output.print_new(path, final=False)
    assert capsys.readouterr().out == "caf\u00e9 "
    path.write_bytes(b"new")
    output.print_new(path, final=False)
    path.write_bytes(b"new \xe2")
    output.print_new(path, final=True)
    assert capsys.readouterr().out == "new \ufffd", "the job was requeued, and truncated its file"
