"""Strangers at the ports of real servers, over loopback: an honest client is served, the run ends well."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_serve import answer, serve
from tests.helpers.support import DONE, Starter

FILES = 300
HELD_S = 2.0  # longer than rank 0 goes without looking at the other ranks' processes
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"


def with_few_files(starter: Starter) -> Starter:
    """Return a starter whose processes may open few files."""
    python = Path(starter.folder / "python")
    python.write_text(f'#!/bin/sh\nulimit -n {FILES}\nexec {starter.python} "$@"\n')
    python.chmod(0o755)
    starter.python = str(python)
    return starter


@contextlib.contextmanager
def strangers(host: str, port: int, n: int, says: bytes = b"") -> Iterator[None]:
    """Hold `n` connections that have said no more than `says`."""
    with contextlib.ExitStack() as stack:
        for _ in range(n):
            with contextlib.suppress(OSError):  # closed at once
                one = stack.enter_context(socket.create_connection((host, port), 10.0))
                one.sendall(says)
        yield


@pytest.mark.parametrize("says", [b"", HALF])
def test_strangers_take_no_file_from_the_run(one: Starter, says: bytes) -> None:
    """They hold more connections than the server may open files."""
    command, host, port = serve(with_few_files(one), 3, "--core_type", "dummy")
    with strangers(host, port, FILES + 20, says):
        time.sleep(HELD_S)
        assert answer(host, port, "/v1/completions", prompt=[1, 2], max_tokens=2)["usage"]
        command.process.send_signal(signal.SIGTERM)
        ended = command.end().must(DONE)
    assert ended.result["status"] == "SERVED"
