"""A run directory belongs to one run at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from disagg.errors import ConfigError
from mpillm.files import read_json, write_json
from mpillm.loadgen.logs import ACCURACY, DETAIL, SUMMARY
from mpillm.options.options import parse_run
from mpillm.report.run_directory import CERTIFICATE, STALE_FILES, lock, take_directory, unused
from mpillm.report.run_environment import ENVIRONMENT
from mpillm.runtime.whole_runs import run_in
from mpillm.submission.compliance_tests import FILES

TAKE = """
import sys; from pathlib import Path; from mpillm.report.run_directory import lock
lock(Path(sys.argv[1])); print('taken', flush=True); sys.stdin.read()
"""

TAKE_AS = """
import os, sys
from mpillm.options.options import parse_run
from mpillm.report.run_directory import take_directory
for path in sys.argv[2:]:
    try:
        take_directory(parse_run(['--core_type', 'dummy', '--force', '--log_dir', path]), 'x')
        print('taken')
    except Exception as error:
        print(error)
    os.setuid(int(sys.argv[1]))  # when all is imported
"""


def test_one_run_at_a_time(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", TAKE, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdin is not None and other.stdout is not None
    with other:
        assert other.stdout.readline() == b"taken\n"
        with pytest.raises(ConfigError, match=f"--log_dir {tmp_path}: another run is writing to it"):
            lock(tmp_path)
    lock(tmp_path)  # a run that has ended, however it did, keeps nothing


def test_the_results_of_a_test_are_replaced_on_demand_only(tmp_path: Path) -> None:
    def taken(name: str, *more: str) -> Path:
        arguments = ["--core_type", "dummy", "--log_dir", str(tmp_path / name), *more]
        return take_directory(parse_run(arguments), "x")

    for name, content in (("served", "result.json"), ("tested", DETAIL), ("again", DETAIL)):
        (tmp_path / name).mkdir()
        (tmp_path / name / content).write_text("")
    assert taken("new") == tmp_path / "new"
    assert taken("served") == tmp_path / "served"  # or failed before its test
    with pytest.raises(ConfigError, match=r"tested: it holds the results of a test; .*--force"):
        taken("tested")
    with pytest.raises(ConfigError, match=r"tested: it holds the results of a test"):
        run_in(tmp_path / "tested", ("-n", "2"), ())
    assert taken("again", "--force") == tmp_path / "again"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
@pytest.mark.parametrize("user", [0, 1001])
def test_what_another_user_could_have_led_elsewhere_is_not_written(user: int) -> None:
    """Its owner may put a link there, to any file of who runs, while the run goes on."""
    with tempfile.TemporaryDirectory() as made:
        top = Path(made)
        top.chmod(0o777)
        for name in ("first", "mine", "roots", "theirs", "planted"):
            (top / name).mkdir()
            (top / name).chmod(0o777)
        os.chown(top / "mine", user, user)
        os.chown(top / "theirs", 1002, 1002)
        os.chown(top / "planted", user, user)
        (top / "planted" / DETAIL).symlink_to("/etc/passwd")
        os.chown(top / "planted" / DETAIL, 1002, 1002, follow_symlinks=False)

        paths = [str(top / name) for name in ("first", "new", "mine", "roots", "theirs", "planted")]
        words = [sys.executable, "-c", TAKE_AS, str(user), *paths]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300)
        assert done.stdout.splitlines() == [
            *["taken"] * 4,
            f"--log_dir {top}/theirs: user 1002 owns it; name a folder of your own",
            f"--log_dir {top}/planted: user 1002 owns {DETAIL} in it; name a folder of your own",
        ]
        assert not done.stderr


def test_runs_of_one_second(tmp_path: Path) -> None:
    path = tmp_path / "run-1.5"
    assert unused(path) == path
    path.mkdir()
    assert unused(path) == tmp_path / "run-1.5-2"
    (tmp_path / "run-1.5-2").mkdir()
    assert unused(path) == tmp_path / "run-1.5-3"


def test_a_name_that_is_no_utf8(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")  # Latin-1, as an old disk may have it
    write_json(tmp_path / "config.json", {"log_dir": name, "title": "café"})
    assert read_json(tmp_path / "config.json") == {"log_dir": name, "title": "café"}
    assert "café" in (tmp_path / "config.json").read_text(encoding="utf-8")


def test_nothing_of_an_earlier_run_passes_for_this_ones() -> None:
    assert {CERTIFICATE, DETAIL, SUMMARY, ACCURACY, ENVIRONMENT} <= {*STALE_FILES}
    assert {f"{test}/{name}" for test, name in FILES.items()} <= {*STALE_FILES}
