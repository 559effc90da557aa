"""Lines of real servers' logs that name failures, far above the logs' ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launch.command import Command
from launch.first_failure import failing_lines
from launch.owned_server import OwnedServer
from tests.helpers.support import wait_until

TABLE = "".join(f"| option_{i:<20} | value |\n" for i in range(40))

# What tritonserver 2.51 wrote of a config.pbtxt with a placeholder.
TRITON = (
    "$ tritonserver --log-error=1\n"
    'W1128 19:48:36.185504 8673 pinned_memory_manager.cc:273] "Unable to allocate: error: no driver"\n'
    'I1128 19:48:36.185608 8673 cuda_memory_manager.cc:117] "CUDA memory pool disabled"\n'
    "[libprotobuf ERROR google/protobuf/text_format.cc:337] Error parsing text-format: 3:17: Expected\n"
    "E1128 19:48:36.191316 8673 model_repository_manager.cc:1460] \"Poll failed for model directory 'm':"
    ' failed to read text proto from /repo/m/config.pbtxt"\n'
    f"{TABLE}"
    "error: creating server: Internal - failed to load all models\n"
)
VLLM = (
    "(APIServer pid=7) WARNING 11-28 19:27:15 [system_utils.py:255] failed to increase: OSError: limit\n"
    "(EngineCore pid=8) ERROR 11-28 19:30:14 [core.py:906] EngineCore failed to start.\n"
    "(EngineCore pid=8) ERROR 11-28 19:30:14 [core.py:906] Traceback (most recent call last):\n"
    '(EngineCore pid=8) ERROR 11-28 19:30:14 [core.py:906]   File "core.py", line 849, in run\n'
    "(EngineCore pid=8) ERROR 11-28 19:30:14 [core.py:906]     raise ValueError(text)\n"
    "(EngineCore pid=8) ERROR 11-28 19:30:14 [core.py:906] ValueError: too little memory\n"
    "RuntimeError: Engine core initialization failed. See root cause above.\n"
)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (TRITON, ["[libprotobuf ERROR", "E1128 19:48:36.191316", "error: creating server"]),
        (
            VLLM,
            ["(EngineCore pid=8) ERROR 11-28 19:30:14 [core.py:906] EngineCore failed", "(EngineCore pid=8"],
        ),
        (f"Traceback (most recent call last):\n  File x\nKeyError: 'a'\n{TABLE}", ["KeyError: 'a'"]),
        ("INFO: no error here\n", []),
        ("\n".join(f"ERROR {i}" for i in range(9)), ["ERROR 0", "ERROR 1", "ERROR 2"]),
        ("ERROR again\n" * 9, ["ERROR again"]),
        (f"ERROR {'x' * 10**6}", ["ERROR xxx"]),
        ("", []),
    ],
)
def test_the_first_lines_of_a_failure(text: str, lines: list[str], tmp_path: Path) -> None:
    (log := tmp_path / "server.log").write_text(text)
    found = failing_lines(log)
    assert len(found) == len(lines) and all(map(str.startswith, found, lines)), found
    assert max(map(len, found), default=0) <= 400
    assert failing_lines(log, len(text)) == []


def test_a_log_that_is_missing(tmp_path: Path) -> None:
    assert failing_lines(tmp_path / "none.log") == []


def test_the_cause_is_not_the_end_of_the_log(tmp_path: Path) -> None:
    """An older failure, of another start, is none of this one."""
    (log := tmp_path / "server.log").write_text("ERROR of the first start\n")
    server = OwnedServer(Command((sys.executable, "-c", f"print({TRITON!r}); raise SystemExit(1)")), log)
    try:
        why = wait_until(server.ended, "its end")
    finally:
        server.stop(1.0)
    cause = server.cause("server 0", why, lambda text: "")
    first, _, *rest = cause.splitlines()
    assert first == "server 0: ended with exit code 1" and "of the first start" not in cause
    assert rest[1].startswith("  | E1128 19:48:36.191316") and "config.pbtxt" in rest[1]
    assert cause.count("error: creating server") == 1, "it is in the end of the log"


def test_failures_before_a_server_was_ready_are_not_its_end(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    code = "import time; print('ERROR at first', flush=True); time.sleep(60)"
    server = OwnedServer(Command((sys.executable, "-c", code)), log)
    try:
        wait_until(lambda: "ERROR at first\n" in log.read_text(), "its line")
        server.ready()
        with log.open("a") as file:
            file.write(f"ERROR later\n{TABLE}")
        cause = server.cause("server 0", "is stopped", lambda text: "")
    finally:
        server.stop(1.0)
    assert "  | ERROR later\n" in cause and "ERROR at first" not in cause
