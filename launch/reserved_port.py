"""Reserved port of this host, until a server listens on it."""

from __future__ import annotations

import socket


class ReservedPort:
    """A free port that is bound, without a listener.

    The system does not assign the port to a process that requests any free port. Another run that reserves
    ports in this way gets another port. A server that sets SO_REUSEADDR, like nearly all servers, can listen
    on the reserved port. For other servers, call `release` first.
    """

    def __init__(self, host: str) -> None:
        """`host`: the address at which the server will listen. Raises OSError if it is not this host's."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, 0))
        except OSError:
            self._socket.close()
            raise
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Close the port."""
        self._socket.close()
