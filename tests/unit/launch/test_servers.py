"""Servers: started, ready, watched, ended; here and on another host."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from disagg.errors import ConfigError
from launch import health_check
from launch.children import Child
from launch.command import Command
from launch.health_check import HealthCheck
from mpillm.stages.servers import Server, ServerFailed, Servers, check_ports, files_of, write_files
from tests.helpers.ports import free_port
from tests.helpers.support import wait_until

# Answers this many health checks on its port, and then does what the next words say.
ANSWERS = """
import http.server, os, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *words):
        pass
with http.server.HTTPServer(("localhost", int(sys.argv[1])), Handler) as server:
    for _ in range(int(sys.argv[2])):
        server.handle_request()
    print("answered", flush=True)
    exec(sys.argv[3])
"""


# A test waits for nothing between two looks.
servers = partial(Servers, poll_s=0.02, check_interval_s=0.05)


@pytest.fixture
def taken() -> Iterator[int]:
    """Yield a port that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        listener.listen()
        yield listener.getsockname()[1]


def answering(then: str, times: int = 1, name: str = "one") -> Server:
    port = free_port()
    command = Command((sys.executable, "-c", ANSWERS, str(port), str(times), then))
    return Server(name, command, {"HTTP": port}, (f"http://localhost:{port}/",), (f"localhost:{port}",))


def test_it_is_ready_and_ends(tmp_path: Path) -> None:
    server = answering("", times=2)  # it ends after a check that is made once it is ready
    with servers(tmp_path) as running:
        log = running.start_server(server)
        assert running.wait_ready(60) < 60
        assert running.watch(60) == "one"
    assert log == tmp_path / "one.log" and log.read_text().endswith("\nanswered\n")


def test_it_answers_no_more(tmp_path: Path) -> None:
    """A server that runs but does not answer is reported."""
    with servers(tmp_path) as running:
        running.start_server(answering("time.sleep(600)"))
        running.wait_ready(60)
        message = r"^no answer to a health check for 0.5 s \(--stall_timeout\): one; (http[^;]+; )?the end of"
        with pytest.raises(ServerFailed, match=message) as failed:
            running.watch(0.5)
    assert failed.value.was_ready and str(failed.value).endswith("  | answered")


def test_it_dies_after_it_was_ready(tmp_path: Path) -> None:
    with servers(tmp_path) as running:
        running.start_server(answering("os.kill(os.getpid(), 9)", times=2))
        running.wait_ready(60)
        with pytest.raises(
            ServerFailed,
            match=r"^one was ended by signal 9 \(SIGKILL\) after it was ready; the end of .*one.log:\n",
        ) as failed:
            running.watch(60)
    assert failed.value.was_ready


NEEDED = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
"""


@pytest.mark.parametrize("is_reaped", [True, False])
def test_a_process_that_it_needs_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_reaped: bool
) -> None:
    """It answers health checks as before, as tritonserver does without a model's process."""
    then = f"{'child.wait()' if is_reaped else ''}\nwhile True: server.handle_request()"
    port = free_port()
    source = NEEDED + ANSWERS
    command = Command((sys.executable, "-c", source, str(port), "1", then))
    server = Server("one", command, {"HTTP": port}, (f"http://localhost:{port}/",), needs="python")
    with servers(tmp_path, end_s=0.1) as running:
        running.start_server(server)
        running.wait_ready(60)
        (needed,) = psutil.Process(running.running()[0].process.pid).children()
        assert running.poll(60) is None
        needed.kill()
        message = rf"^one: its process {needed.pid} \(python\S*\) has ended; the end of .*one.log:\n"
        with pytest.raises(ServerFailed, match=message) as failed:
            running.watch(60)
    assert failed.value.was_ready


def test_one_ends_while_another_starts(tmp_path: Path) -> None:
    """An exit code of 0 before it was ready is a failure, too."""
    with servers(tmp_path) as running:
        running.start_server(answering("time.sleep(600)"))
        running.start_server(
            Server("two", Command((sys.executable, "-c", "print('bye')")), {}, ("http://localhost:9/",))
        )
        with pytest.raises(
            ServerFailed, match=r"^two ended with exit code 0 before it was ready; .*\n(.*\n)*  \| bye$"
        ) as failed:
            running.wait_ready(60)
    assert not failed.value.was_ready


def test_it_is_never_ready(tmp_path: Path, taken: int) -> None:
    hangs = Server(
        "one",
        Command((sys.executable, "-c", "import time; time.sleep(600)")),
        {},
        (f"http://localhost:{free_port()}/",),
    )
    with servers(tmp_path) as running:
        running.start_server(hangs)
        message = (
            r"^not ready within 3 s \(--load_deadline\): one; http://\S+: Connection refused; the end of the"
        )
        with pytest.raises(ServerFailed, match=message):
            running.wait_ready(3)


def test_a_loop_of_the_callers_own(tmp_path: Path) -> None:
    """`look` returns at once as long as all is well, also in a thread that may set no signal handlers."""
    seen: list[str | None] = []

    def work() -> None:
        with servers(tmp_path) as running:
            running.start_server(answering("", times=2))
            running.wait_ready(60)
            seen.append(running.poll(60))
            seen.append(running.watch(60))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(300)
    assert seen == [None, "one"]


class Checks:
    """Keeps health checks without an answer until the test ends."""

    def __init__(self, n: int) -> None:
        self.under_way = threading.Barrier(n)
        self.end = threading.Event()
        self.begun: list[str] = []  # URLs of checks that run at the same time
        self.answered: list[str] = []

    def problem(self, url: str) -> str:
        self.under_way.wait(300)  # broken unless all checks run at the same time
        self.begun.append(url)
        self.end.wait(300)
        self.answered.append(url)
        return "no answer"


def silent(n: int) -> list[Server]:
    """Return servers that run and answer nothing."""
    sleeps = Command((sys.executable, "-c", "import time; time.sleep(600)"))
    return [Server(f"server {i}", sleeps, {}, (f"http://localhost:9/{i}",)) for i in range(n)]


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Checks]:
    checks = Checks(4)
    monkeypatch.setattr(health_check, "_problem", checks.problem)
    yield checks
    assert not checks.under_way.broken and checks.answered == [], "somebody has waited for an answer"
    checks.end.set()


def test_a_deadline_holds_for_any_number_of_silent_servers(tmp_path: Path, checks: Checks) -> None:
    with servers(tmp_path) as running:
        for server in silent(4):
            running.start_server(server)
        with pytest.raises(
            ServerFailed,
            match=r"^not ready within 0.2 s \(--load_deadline\): server 0, server 1, server 2, server 3;",
        ):
            running.wait_ready(0.2)


def test_a_look_waits_for_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checks: Checks) -> None:
    """It reports servers that have been silent for too long, all the same."""
    monkeypatch.setattr(health_check, "_ANSWER_S", 0.1)
    with servers(tmp_path) as running:
        with monkeypatch.context() as ready:
            ready.setattr(health_check, "_problem", lambda url: "")
            for server in silent(4):
                running.start_server(server)
            running.wait_ready(60)
        wait_until(lambda: running.poll(1e9) is None and len(checks.begun) == 4, "the checks")
        assert running.poll(1e9) is None
        with pytest.raises(
            ServerFailed, match=r"^no answer to a health check for 0.2 s \(--stall_timeout\): server "
        ):
            running.watch(0.2)


def test_a_server_that_answers_is_not_silent_between_two_looks(tmp_path: Path) -> None:
    """The limit is shorter than the time between the looks."""
    checks = set[HealthCheck]()
    with servers(tmp_path) as running:
        running.start_server(answering("", times=10**6))
        running.wait_ready(60)

        def look() -> bool:
            checks.update(running._checks.values())
            return running.poll(1e-9) is None and len(checks) > 3

        wait_until(look, "three looks")


def test_an_answer_between_two_looks_counts(tmp_path: Path) -> None:
    """The only answer comes just before the next health check."""
    come = threading.Event()
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(200 if come.wait(300) else 500)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    class Waits(Servers):
        def ended(self) -> Child | None:
            """Let the answer to a check come before the next look."""
            for check in self._checks.values():
                come.set()
                check.wait(time.monotonic() + 60)
            return super().ended()

    with HTTPServer(("localhost", 0), Handler) as http, Waits(tmp_path, poll_s=0.02) as running:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        sleeps = Command((sys.executable, "-c", "import time; time.sleep(600)"))
        running.start_server(Server("one", sleeps, {}, (f"http://localhost:{http.server_port}/",)))
        running.wait_ready(60)
        http.shutdown()
    assert len(paths) == 1


def test_a_port_for_two() -> None:
    port = free_port()
    one, two = (Server(name, Command(("x",)), {"HTTP": port}, ()) for name in ("one", "two"))
    with pytest.raises(ConfigError, match=f"port {port} is given to both HTTP of two and HTTP of one"):
        check_ports([one, two])


def test_a_port_that_is_taken(taken: int) -> None:
    server = Server("one", Command(("x",)), {"HTTP": taken}, ())
    with pytest.raises(
        ConfigError, match=f"can't listen on port {taken} for HTTP of one: process {os.getpid()} "
    ):
        check_ports([server])


def test_files_are_written_once(tmp_path: Path) -> None:
    file = tmp_path / "a" / "options.yaml"
    two = [Server(name, Command(("x",)), {}, (), files={file: "text"}) for name in ("one", "two")]
    assert files_of(two) == {file: "text"}
    write_files(tmp_path / "logs", two)
    assert file.read_text() == "text" and (tmp_path / "logs").is_dir()
