"""What a terminal shows when a run has ended: stdout and stderr are one, as in front of a person."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.helpers.failures import ENDLESS, GRACE
from tests.helpers.ports import free_port
from tests.helpers.screen import screen
from tests.helpers.support import (
    DONE,
    INSTANCE_LOST,
    NOT_READY,
    ROOT,
    TEST_FAILED,
    Command,
    Ended,
    Starter,
    wait_until,
)

BAR = re.compile(r"\d samples  \d|tok/s")
PLUGIN = "tests.helpers.plugin_cores:Faulty"


def see_bar(command: Command) -> None:
    """Wait until the bar has been drawn a few times, with what the instances compute below it."""
    wait_until(lambda: command.out.count("samples  ") > 2 and "tok/s" in command.out, "the bar")


def whole_message(ended: Ended) -> list[str]:
    """Return the screen's lines from the message of a failure on; no line of it may be missing or cut."""
    lines = screen(ended.out, 200)
    first = next((i for i, line in enumerate(lines) if re.match(r"mpillm: (failed|interrupted)", line)), None)
    assert first is not None, "no message on the screen:\n" + "\n".join(lines)
    message = lines[first:]
    assert not any(BAR.search(line) for line in message), message
    assert all(len(line) <= 80 or len(max(line.split(), key=len)) > 40 for line in message), message
    text = " ".join(" ".join(message).split())
    for failure in ended.result["failures"]:
        assert " ".join(failure["cause"].split()) in text, (failure["cause"], message)
    assert any(re.match(r"  see ", line) for line in message), message
    return message


@pytest.mark.parametrize("phase", ["load", "warmup"])
def test_a_failure_before_the_test(both: Starter, phase: str) -> None:
    options = [*ENDLESS, "--core_options", f"fault:raise,fault_phase:{phase},fault_rank:2"]
    ended = both.start(3, *options, terminal=True, one_terminal=True).end().must(NOT_READY)
    assert whole_message(ended)[0] == f"mpillm: failed in phase '{phase}'"


def test_a_failure_in_the_test(both: Starter) -> None:
    """While a bar is drawn."""
    env = {"PYTHONPATH": str(ROOT), "MPILLM_TEST_FAULT": "told:raise:2"}
    command = both.start(3, *ENDLESS, env=env, terminal=True, one_terminal=True, core=PLUGIN)
    see_bar(command)
    (both.folder / "fail").touch()
    ended = command.end().must(TEST_FAILED)
    assert whole_message(ended)[0] == "mpillm: failed in phase 'test'"


@pytest.mark.parametrize("where", ["ready", "drain", "stop"])
def test_a_failure_in_other_phases(one: Starter, where: str) -> None:
    env = {"PYTHONPATH": str(ROOT), "MPILLM_TEST_FAULT": f"{where}:raise:1"}
    command = one.start(
        2, *GRACE, "--min_duration", 1, env=env, terminal=True, one_terminal=True, core=PLUGIN
    )
    ended = command.end()
    assert ended.code in (NOT_READY, TEST_FAILED), repr(ended)
    assert whole_message(ended)[0].startswith("mpillm: failed in phase ")


def test_ctrl_c_in_the_test(both: Starter) -> None:
    command = both.start(3, *ENDLESS, controlling=True, one_terminal=True)
    see_bar(command)
    command.press_ctrl_c()
    ended = command.end().must(130)
    assert whole_message(ended)[0] == "mpillm: interrupted (Ctrl-C) in phase 'test'"
    assert "mpillm mpirun: Ctrl-C: stopping the ranks; press Ctrl-C again to kill them" in screen(
        ended.out, 200
    )


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (signal.SIGKILL, "its log has no cause, as after SIGKILL"),
        (signal.SIGSEGV, "SIGSEGV ended it: its log has the stacks"),
    ],
)
def test_a_killed_rank(both: Starter, number: int, cause: str) -> None:
    """Its signal is named as far as it can be known: no MPI's mpirun reports it."""
    command = both.start(3, *ENDLESS, terminal=True, one_terminal=True)
    see_bar(command)
    os.kill(command.wait_rank(2), number)
    message = whole_message(command.end().must(INSTANCE_LOST))
    assert message[0] == "mpillm: failed in phase 'test'"
    assert any(cause in line for line in message), message


@pytest.mark.smoke
def test_a_killed_rank_0(both: Starter) -> None:
    """Nobody but the launcher can say it."""
    command = both.start(3, *ENDLESS, terminal=True, one_terminal=True)
    see_bar(command)
    os.kill(command.wait_rank(0), signal.SIGKILL)
    lines = screen(command.end(tidy=False).must(INSTANCE_LOST).out, 200)
    # With where its result is, below.
    (at,) = (i for i, line in enumerate(lines) if "rank 0 ended without an exit code" in line)
    assert all(line.startswith("  ") and not re.search(BAR, line) for line in lines[at + 1 :]), lines


@pytest.mark.smoke
def test_a_good_end(both: Starter) -> None:
    """The bar is gone, and every phase has its line."""
    options = ["--scenarios", "Server", "--server_target_qps", 150, "--min_duration", 3]
    ended = both.start(3, *options, terminal=True, one_terminal=True).end().must(DONE)
    assert re.search(BAR, ended.out)
    lines = screen(ended.out, 200)
    phases = [line.split()[0] for line in lines if re.match(r"  [a-z]+ +\d+\.\d\d s", line)]
    assert phases == ["join", "load", "health", "warmup", "ready", "test", "drain", "stop"], lines
    assert not any(re.search(BAR, line) for line in lines), lines
    assert lines[-1].startswith("  page"), lines


def test_a_bar_of_few_requests(one: Starter) -> None:
    """It is drawn although hardly ever one of them is open when it is due."""
    options = ["--scenarios", "Server", "--server_target_qps", 2, "--min_duration", 4, "--min_query_count", 8]
    ended = one.start(2, *options, terminal=True, one_terminal=True).end().must(DONE)
    assert len(re.findall(r"\d samples  \d", ended.out)) > 3, ended.out


def test_one_rank_without_mpirun(one: Starter, tmp_path: Path) -> None:
    """It draws on the terminal itself."""
    options = ["--core_type", "dummy", *ENDLESS, "--log_dir", tmp_path / "run"]
    command = one.command([one.python, "-m", "mpillm", "run", *options], controlling=True, one_terminal=True)
    see_bar(command)
    command.press_ctrl_c()
    assert whole_message(command.end().must(130))[0] == "mpillm: interrupted (Ctrl-C) in phase 'test'"


def test_runs_that_another_command_starts(one: Starter) -> None:
    """The progress of each run is drawn while it goes on, and removed afterwards."""
    options = ("-n", 2, "--core_type", "dummy", "--server_target_qps", 20, "--goodput", "ttft:500")
    lengths = ("--min_duration", 60, "--probe_duration", 8)
    words = [one.python, "-m", "mpillm", "find-max-qps", *options, *lengths]
    command = one.command(words, controlling=True, one_terminal=True)
    progress = r"  01-short-20, \d+ s: test \d+/\d+ samples .* left"
    wait_until(lambda: re.search(progress, command.out), "the progress of the run", 60.0)
    command.press_ctrl_c()
    lines = screen(command.end().must(130).out, 200)
    assert "no rate has been VALID so far" in lines, lines
    assert any(line.startswith("to go on: ") for line in lines), lines
    assert not any(re.match(r" +01-short", line) for line in lines), lines


def test_a_server_that_is_not_there(one: Starter) -> None:
    """It is named within seconds with its error, on a terminal and in a log."""
    url = f"127.0.0.1:{free_port()}"
    options = ["--trtllm_server_urls", f"http://{url}/v1"]
    for terminal in (True, False):
        command = one.start(2, *options, core="trtllm_endpoint", terminal=terminal, one_terminal=terminal)
        # The rest of "refused" is behind 80 columns.
        waiting = rf"load +after \d+ s  rank 1: waiting for http://{url}: Connection r"
        wait_until(lambda: re.search(waiting, command.out), "the server's name", 30.0)  # noqa: B023
        more = r"at most\s+54\s+s\s+\(--load_deadline\)[^;]+;\s+with --server"
        wait_until(lambda: re.search(more, command.out), "how long it waits", 30.0)  # noqa: B023
        command.kill()


def test_weights_that_take_long_to_read(one: Starter, tmp_path: Path) -> None:
    """The progress counts the bytes that are read."""
    options = ["--model_path", "llama3.2-1b", "--max_output_len", 4, "--load_format", "dummy"]
    command = one.start(2, *options, core="torch", terminal=True, one_terminal=True)
    progress = r"load +after \d+ s  rank 1: \d\.\d\d of \d\.\d\d GB of weights"
    wait_until(lambda: re.search(progress, command.out), "the bytes read", 60.0)
    command.kill()
