"""A fake of ssh between hosts made of namespaces, from which only `head` can enter another one.

``python -m tests.helpers.remote_commands`` on each host runs the commands that the others send to it.
``python -m tests.helpers.remote_commands HOST COMMAND…`` sends one, and ends as it does.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

PORT = 7022
_START_S = 60.0


def serve() -> None:
    """Run commands until standard input ends."""
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    with socket.create_server((socket.gethostname(), PORT)) as server:
        print("ready", flush=True)
        while True:
            connection = server.accept()[0]
            threading.Thread(target=_run, args=(connection,), daemon=True).start()


def _run(connection: socket.socket) -> None:
    with connection, connection.makefile("r") as lines:
        out = connection.fileno()
        code = subprocess.run(lines.readline(), shell=True, stdout=out, stderr=out, check=False).returncode
        connection.sendall(f"\n{code}".encode())


def send(host: str, command: str) -> int:
    """Run a command on a host; return its exit code."""
    with socket.create_connection((host, PORT), timeout=_START_S) as connection:
        connection.settimeout(None)
        connection.sendall(command.encode() + b"\n")
        connection.shutdown(socket.SHUT_WR)
        output, _, code = b"".join(iter(lambda: connection.recv(4096), b"")).decode().rpartition("\n")
    print(output, end="", flush=True)
    return int(code)


if __name__ == "__main__":
    args = [arg for arg in sys.argv[1:] if not arg.startswith("-")]
    if not args:
        serve()
    sys.exit(send(args[0], " ".join(sys.argv[sys.argv.index(args[0]) + 1 :])))
