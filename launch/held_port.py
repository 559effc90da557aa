"""A port of this host that no other process is given until a server listens on it."""

from __future__ import annotations

import socket


class HeldPort:
    """A free port, bound and not listened on.

    The system gives it to nobody who asks for any port, and another run that holds its ports in this way
    gets another one. A server that sets SO_REUSEADDR, as nearly all do, can listen on it meanwhile; for one
    that does not, `let_go` first.
    """

    def __init__(self, host: str) -> None:
        """`host`: the address that the server will listen at. Raises OSError if there is none such here."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, 0))
        except OSError:
            self._socket.close()
            raise
        self.number: int = self._socket.getsockname()[1]

    def let_go(self) -> None:
        """Give it back to the system."""
        self._socket.close()
