"""``python -m tests.helpers.small_server --port N …``: a server program that does what a test says."""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from tests.helpers.scripted_server import Reply, Request, ScriptedServer, good, plain

_MEET_S = 60.0
_MEGABYTES = 300  # of a worker: as much as a process has that a server can't do without


def main() -> None:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--model", default="")
    parser.add_argument("--pause_s", type=float, default=0.0, help="before each answer")
    parser.add_argument("--at_once", type=int, default=0, help="so many answers, the first, without a pause")
    parser.add_argument("--token_s", type=float, default=0.0, help="between the pieces of a stream")
    parser.add_argument("--ready_after_s", type=float, default=0.0)
    parser.add_argument("--says", default="", help="a line of its log, once it has started")
    parser.add_argument("--fails_once", default="", help="a file: it makes it and fails, if it is not there")
    parser.add_argument("--exits_after_s", type=float, default=0.0)
    parser.add_argument("--metrics_s", type=float, default=0.0, help="before it says what it counts")
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--compiles", action="store_true", help="as long as one large process needs, once")
    parser.add_argument("--lingers_s", type=float, default=0.0, help="at its end")
    parser.add_argument("--waits", action="store_true", help="at its end, until its clients are gone")
    parser.add_argument("--gives_up", action="store_true", help="without its worker: 500, and its end with 0")
    parser.add_argument("--part", nargs=4, metavar=("NODE", "NODES", "HOST", "PORT"), help="of several nodes")
    options = parser.parse_args()
    if options.says:
        print(options.says, flush=True)
    if options.fails_once:
        try:
            with open(options.fails_once, "x"):  # noqa: PTH123 - x is what matters
                sys.exit("[Errno 98] error while attempting to bind on address: address already in use")
        except FileExistsError:
            print("again", flush=True)
    if options.worker:
        size = 1 if options.gives_up else _MEGABYTES
        code = f"import time; x = b'x' * ({size} << 20); time.sleep(600)"
        worker = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        if options.gives_up:  # and collects its exit status, so that no other code can
            threading.Thread(target=worker.wait, daemon=True).start()
    time.sleep(options.ready_after_s)
    if options.part:
        meet(*options.part)

    compiler = f"import time; x = b'x' * ({_MEGABYTES} << 20); time.sleep(1)"
    compiling = threading.Lock()
    numbers = itertools.count()

    def answer(request: Request) -> Reply:
        with compiling:
            if options.compiles:
                options.compiles = False
                subprocess.run([sys.executable, "-c", compiler], check=True)
        if next(numbers) >= options.at_once:
            time.sleep(options.pause_s)
        if options.gives_up and worker.returncode is not None:
            threading.Timer(1.0, os._exit, [0]).start()
            return plain(
                {"error": {"message": "EngineCore encountered an issue"}}, "500 Internal Server Error"
            )
        reply = good(request)
        return Reply(slowly(reply.pieces)) if options.token_s else reply

    def slowly(pieces: Iterable[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            time.sleep(options.token_s)
            yield piece

    def counts(_: Request) -> Reply:
        time.sleep(options.metrics_s)
        return plain({})

    others: dict[str, Callable[[Request], Reply]] = {"/metrics": counts} if options.metrics_s else {}
    with ScriptedServer(answer, others, port=options.port, host=options.host) as served:

        def wait(_number: int, _frame: object) -> None:
            time.sleep(options.lingers_s)
            while options.waits and served.has_clients():
                time.sleep(0.05)
            print("its clients are gone", flush=True)
            os._exit(0)

        if options.waits or options.lingers_s:
            signal.signal(signal.SIGTERM, wait)
        time.sleep(options.exits_after_s or 600)
        print("enough", flush=True)


def meet(node: str, nodes: str, host: str, port: str) -> None:
    """Return on the first node, once the other parts have come; another part ends with the first."""
    if node == "0":
        with socket.create_server(("", int(port))) as meeting:
            meeting.settimeout(_MEET_S)
            others = [meeting.accept()[0] for _ in range(int(nodes) - 1)]
        for other in others:
            threading.Thread(target=end_with, args=(other,), daemon=True).start()
        return
    end = time.monotonic() + _MEET_S
    while True:
        try:
            first = socket.create_connection((host, int(port)), 5)
            break
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
    print(f"part {node} has met the first", flush=True)
    first.settimeout(None)
    end_with(first)


def end_with(other: socket.socket) -> None:
    """End this process when the other end of a connection is gone."""
    try:
        other.recv(1)
    except OSError as error:
        print(error, flush=True)
    print("another part has ended", flush=True)
    os._exit(1)


if __name__ == "__main__":
    main()
