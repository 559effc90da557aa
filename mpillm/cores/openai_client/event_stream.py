"""Server-sent events (HTML standard, 9.2.6), as language model servers send them."""

from __future__ import annotations

from launch.bounded_http import MOST_EVENT

_PLAIN, _BETWEEN = b"data: ", b"\n\ndata: "
_FIELDS = (b"event", b"id", b"retry")  # that say nothing of an answer
_BOM = b"\xef\xbb\xbf"


class EventStream:
    """Bytes in, the data of whole events out. Lines end with LF or CR LF."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._begins = True
        self._waited = 0  # bytes since the last event

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of each event that ends in `data`.

        Raises ValueError for a line that is no event's, or more than 16 MiB without an event.
        """
        if data.startswith(_PLAIN) and data.endswith(b"\n\n") and not (self._rest or self._data):
            plain = data[len(_PLAIN) : -2].split(_BETWEEN)
            self._waited = 0
            if data.count(b"\n") == 2 * len(plain) and b"\r" not in data:
                return plain  # whole events of one line each, as almost always: a fifth of the time
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        events: list[bytes] = []
        for line in lines:
            self._take(line, events)
        self._waited = 0 if events else self._waited + len(data)
        if self._waited > MOST_EVENT:
            raise ValueError(f"it sent {self._waited} bytes without an event's end")
        return events

    def finish(self) -> list[bytes]:
        """Return the data of an event that the end of the stream ends."""
        return self.feed(b"\n\n")

    def _take(self, line: bytes, events: list[bytes]) -> None:
        if self._begins:
            self._begins, line = False, line.removeprefix(_BOM)
        if line.endswith(b"\r"):
            line = line[:-1]
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line[5:6] == b" " else line[5:])
        elif not line:
            if self._data:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = []
        elif not line.startswith(b":") and line.partition(b":")[0] not in _FIELDS:
            raise ValueError(f"it sent a line that is no server-sent event: {line[:80]!r}")
