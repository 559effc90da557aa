"""Chat templates, rendered in a child process.

A template may come from an untrusted model. Jinja's sandbox rejects unsafe calls, but a template of a few
bytes can run for hours or fill the memory. So a child process (`template_process`) renders chats, with limits
of CPU time and memory.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from disagg.errors import ConfigError
from launch.exits import how_ended
from launch.safe_text import one_line

Messages = Sequence[Mapping[str, Any]]  # a chat in the format of OpenAI's API
Tools = Sequence[Any] | None  # that the model may call, in the same format

_MAX_CPU_S = 10.0  # for one chat
_MAX_BYTES = 1 << 30  # memory of the child process
_MAX_WAIT_S = 120.0  # for one part of a message, on a busy machine
_MAX_END_S = 5.0  # until the kernel reports the end of a child process
_BATCH_BYTES = 1 << 20  # size of a message, unless one chat is larger
_LENGTH_BYTES = 8  # bytes before each message, with its length


class ChatTemplate:
    """A chat template and its child process, for use from any thread."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        max_cpu_s: float = _MAX_CPU_S,
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        """Start the process. `max_cpu_s`: for one chat; `max_bytes`: memory of the process.

        Raises ConfigError if the template does not parse, or jinja2 is not installed.
        """
        if importlib.util.find_spec("jinja2") is None:
            raise ConfigError("the model's chat template needs jinja2: pip install 'mpillm[tokenizer]'")
        self._template = {"template": source, "special": dict(special_tokens)}
        self.writes_tool_calls = "<tool_call>" in source
        self._limits = (max_cpu_s, max_bytes)
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self.render([])

    def render(self, chats: Sequence[Messages], tools: Tools = None) -> list[str]:
        """Return the text of each chat, with these tools. Raises ConfigError if the template fails on one."""
        texts: list[str] = []
        with self._lock:
            self._process = process = self._process or self._started()
            for batch in _batches(chats, tools):
                texts += self._exchange(process, batch, "fails on these messages")
        return texts

    def _started(self) -> _Process:
        try:
            process = _Process(*self._limits)
        except OSError as error:
            raise ConfigError(f"no process for the model's chat template can be started: {error}") from error
        self._exchange(process, encode(self._template), "does not parse")
        return process

    def _exchange(self, process: _Process, message: bytes, failure: str) -> Sequence[str]:
        try:
            reply = process.exchange(message)
        except (OSError, EOFError, ValueError) as error:
            self._process = None
            cause = process.end(error)
        else:
            if "texts" in reply:
                return list(reply["texts"])
            cause = str(reply["error"])
        raise ConfigError(f"the model's chat template {failure}: {one_line(cause)}")


def _batches(chats: Sequence[Messages], tools: Tools) -> Iterator[bytes]:
    """Yield messages with the chats. A message is limited in size, because it is in memory as a whole."""
    batch, size = list[bytes](), 0
    encoded_tools = _encoded(tools)
    for chat in chats:
        data = _encoded(chat)
        if batch and size + len(data) > _BATCH_BYTES:
            yield b'{"chats":[%b],"tools":%b}' % (b",".join(batch), encoded_tools)
            batch, size = [], 0
        batch.append(data)
        size += len(data)
    if batch:
        yield b'{"chats":[%b],"tools":%b}' % (b",".join(batch), encoded_tools)


def _encoded(value: Any) -> bytes:
    try:
        return encode(value)
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"the messages can't be written as JSON: {error}") from None


class _Process:
    """The child process. It ends when this object is deleted, or when this process ends."""

    def __init__(self, max_cpu_s: float, max_bytes: int) -> None:
        self._connection, child_end = socket.socketpair()
        self._connection.settimeout(_MAX_WAIT_S)
        self._max_cpu_s, self._max_bytes = max_cpu_s, max_bytes
        with child_end:
            arguments = map(str, (child_end.fileno(), max_cpu_s, max_bytes))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mpillm.data.template_process", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[child_end.fileno()],
                start_new_session=True,  # Ctrl-C must not reach the child process
            )
        weakref.finalize(self, _end, self._process, self._connection)

    def exchange(self, message: bytes) -> Mapping[str, Any]:
        """Send a message; return the reply. Raises OSError, EOFError or ValueError if the process fails."""
        send(self._connection, message)
        reply: Mapping[str, Any] = receive(self._connection, self._max_bytes)
        return reply

    def end(self, error: Exception) -> str:
        """End the process after an error; return the cause."""
        if isinstance(error, (EOFError, ConnectionError)):  # the process has ended by itself
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_MAX_END_S)
                if code == -signal.SIGPROF:
                    return f"it takes more than {self._max_cpu_s:g} s of CPU time"
                return f"the process that renders it {how_ended(code)}"
        _end(self._process, self._connection)
        return f"the process that renders it failed: {error or type(error).__name__}"


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_MAX_END_S)


def encode(message: Any) -> bytes:
    """Return a message for `send`. Raises RecursionError, or ValueError for a number with too many digits."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")


def send(connection: socket.socket, message: bytes) -> None:
    """Send a message, after its length in bytes. Raises OSError."""
    connection.sendall(len(message).to_bytes(_LENGTH_BYTES, "little") + message)


def receive(connection: socket.socket, max_bytes: int = sys.maxsize) -> Any:
    """Return the next message. Raises OSError, EOFError at the end, ValueError above `max_bytes`."""
    n = int.from_bytes(_read(connection, _LENGTH_BYTES), "little")
    if n > max_bytes:
        raise ValueError(f"a message of {n} bytes")
    return json.loads(_read(connection, n).decode("utf-8", "surrogatepass"))


def _read(connection: socket.socket, n: int) -> bytes:
    data = bytearray()
    while len(data) < n:
        if not (part := connection.recv(min(n - len(data), 1 << 20))):
            raise EOFError
        data += part
    return bytes(data)
