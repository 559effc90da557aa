"""The commands as one program: what a signal does to any of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from launch.children import Children
from launch.signals import stop_signals
from mpillm import cli
from mpillm.core_names import PLUGIN_PACKAGES
from tests.helpers.lone_mpi import leaving_nothing, run_program

ROOT = Path(__file__).parents[3]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Sequence[str]], int]], None]:
    """Make a function the command `it`."""

    def add(function: Callable[[Sequence[str]], int]) -> None:
        module = ModuleType("mpillm.commands.it")
        vars(module)["main"] = function
        monkeypatch.setitem(sys.modules, "mpillm.commands.it", module)
        monkeypatch.setitem(cli.COMMANDS, "it", "")

    return add


@pytest.mark.parametrize("number", stop_signals({}))
def test_a_stopped_command_leaves_nothing_and_names_the_signal(
    command: Callable[[Callable[[Sequence[str]], int]], None],
    tmp_path: Path,
    number: signal.Signals,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A signal between two runs of `ab` printed nothing."""

    def main(_: Sequence[str]) -> int:
        with tempfile.TemporaryDirectory(dir=tmp_path):
            os.kill(os.getpid(), number)
            signal.sigtimedwait([], 5)
        return 0

    before = signal.getsignal(number)
    command(main)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["it"])
    assert stopped.value.code == 128 + number and not list(tmp_path.iterdir())
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert capsys.readouterr().err == f"mpillm: interrupted ({name})\n"
    # One signal only is ours: the second kills. A program that calls `main` has its own back where it was not
    # used.
    assert signal.getsignal(number) == signal.SIG_DFL
    signal.signal(number, before)


def test_a_signal_to_a_command_that_waits_for_a_child_is_named(
    command: Callable[[Callable[[Sequence[str]], int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands that start servers or tools ended without a word."""

    def main(_: Sequence[str]) -> int:
        with Children() as children:
            os.kill(os.getpid(), signal.SIGTERM)
            children.ended()
        return 0

    command(main)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["it"])
    assert stopped.value.code == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "mpillm: interrupted (SIGTERM)\n"


def test_a_signal_whose_exception_c_code_replaces(
    command: Callable[[Callable[[Sequence[str]], int]], None],
) -> None:
    """An interrupt during NumPy's import counts, although NumPy then says that it is badly installed."""

    def main(_: Sequence[str]) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.sigtimedwait([], 5)
        except SystemExit:
            raise ImportError("NumPy is badly installed") from None
        return 0

    before = signal.getsignal(signal.SIGTERM)
    command(main)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["it"])
    assert stopped.value.code == 128 + signal.SIGTERM
    signal.signal(signal.SIGTERM, before)


def test_signals_are_as_they_were(command: Callable[[Callable[[Sequence[str]], int]], None]) -> None:
    def main(_: Sequence[str]) -> int:
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, "nohup"
        return 0

    command(main)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        assert cli.main(["it"]) == 0
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    finally:
        signal.signal(signal.SIGHUP, hangup)


def test_in_another_thread(command: Callable[[Callable[[Sequence[str]], int]], None]) -> None:
    command(lambda _: 5)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(cli.main(["it"])))
    thread.start()
    thread.join()
    assert codes == [5]


def test_a_file_that_the_system_refuses(
    command: Callable[[Callable[[Sequence[str]], int]], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command(lambda _: len((tmp_path / "none" / "file").read_text()))
    assert cli.main(["it"]) == 2
    assert capsys.readouterr().err == f"mpillm: {tmp_path}/none/file: No such file or directory\n"


def test_a_mistake_of_ours_keeps_its_traceback_in_development_mode() -> None:
    program = (
        "import sys, types\nfrom mpillm import cli\nmodule = sys.modules['mpillm.commands.it'] ="
        " types.ModuleType('it')\n"
        "module.main = lambda _: open('none/file')\ncli.COMMANDS['it'] = ''\ncli.main(['it'])\n"
    )
    done = subprocess.run([sys.executable, "-X", "dev", "-c", program], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" in done.stderr and "none/file" in done.stderr


def test_a_terminal_without_the_characters() -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "mpillm", "--help"], env=env, capture_output=True, text=True, check=True
    )
    assert "mpirun -n 5 run ?" in done.stdout and not done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["plan", "--world_size", "4"], ["--help"], ["doctor"]])
def test_a_full_disk_under_what_is_printed(arguments: list[str], unbuffered: str) -> None:
    """The failure is reported even if Python would notice it only at its exit."""
    with Path("/dev/full").open("w") as full, leaving_nothing() as variables:
        done = subprocess.run(
            [sys.executable, "-m", "mpillm", *arguments],
            env={**os.environ, **variables, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (done.returncode, done.stderr) == (
        1,
        "mpillm: a file, or the output, can't be written: No space left on device\n",
    )


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "1>&- 2>&- 0<&-"])
def test_closed_output(closed: str, tmp_path: Path) -> None:
    """Printed text goes nowhere, and not into a file that the command writes."""
    command = (
        f"{sys.executable} -m mpillm generate-disagg-config --mode disaggregated --world_size 4"
        f" --output {tmp_path}/file {closed}"
    )
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "file").read_text().count("wrote") == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone(unbuffered: str) -> None:
    """The command ends quietly when its reader, such as head, has gone."""
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "mpillm", "plan", "--world_size", "4"],
        env=env,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_command_has_a_file_of_its_own() -> None:
    files = {
        f"{where}.commands.{path.stem}"
        for where in ("mpillm", *PLUGIN_PACKAGES)
        for path in (ROOT / where.replace(".", "/") / "commands").glob("*.py")
        if path.stem != "__init__"
    }
    assert files == {*map(cli.module_of, cli.COMMANDS)}


HELP = """
import contextlib, io, sys
from mpillm.cli import COMMANDS, main
from mpillm.experiments.commands.bench import BENCHES
names = [[], *([name] for name in COMMANDS), *(["bench", name] for name in BENCHES)]
for words in [[*name, "--help"] for name in names]:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as out:
        main(words)
    if "usage: " not in out.getvalue():
        print(words, "prints no help", out.getvalue())
print([name for name in ("mpi4py", "torch", "pandas", "transformers", "rich") if name in sys.modules])
"""


def test_help_imports_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_home_that_nobody_has_set(
    command: Callable[[Callable[[Sequence[str]], int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open MPI's programs fail without one."""
    monkeypatch.delenv("HOME")
    found: list[str] = []

    def main(_: Sequence[str]) -> int:
        found.append(os.environ["HOME"])
        return 0

    command(main)
    assert cli.main(["it"]) == 0
    assert Path(found[0]).is_absolute()


PLAN = """
import contextlib, io, sys
from mpillm.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    main(["plan", "--world_size", "4"])
rare = ("mpillm.engine.model.", "mpillm.options.config_file", "mpillm.nvidia.")
print([name for name in sys.modules if name.startswith(rare)])
import mpillm.runtime.rank
print([name for name in ("launch.supervisor", "subprocess") if name in sys.modules])
"""


def test_what_a_start_needs_not_is_not_imported() -> None:
    """Ranks and commands start sooner for it."""
    done = run_program(PLAN)
    assert done.stdout == "[]\n[]\n", done.stderr
