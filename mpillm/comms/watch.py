"""Watch: a thread of each rank that sends heartbeats, and ends the rank if nothing else can.

The main thread may spend minutes in a backend (loading weights), or hang there. So a separate thread sends
the heartbeats. Each contains the time since the main thread was last in its event loop and, if that is long,
its Python stack.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from mpillm.comms.messages import Beat
from mpillm.phases import PHASES, Phase

_HERE = str(Path(__file__).parent)
_INTERVAL_S = 0.5  # between beats
_MAX_BEATS_PER_S = 1024  # that rank 0 reads, and that rank 0 sends


def beat_interval_s(n_ranks: int) -> float:
    """Return the seconds between a rank's heartbeats, which increase for thousands of ranks."""
    return _INTERVAL_S * max(1, round(n_ranks / (_MAX_BEATS_PER_S * _INTERVAL_S)))


STALLED_S = 1.0  # after this time outside the event loop, heartbeats contain the stack


class Watch:
    """Thread that starts with MPI and enforces a limit for each phase."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._main = threading.main_thread().ident
        self._last_tick = time.monotonic()
        self._limit = float("inf")
        self.phase: Phase = PHASES[0]
        self._calling = threading.Lock()
        self._stderr = os.dup(2)
        self._send: Callable[[Beat], None] | None = None
        self._beat_interval_s = self._beat_at = 0.0
        self._stop_requested: Callable[[], int | None] = lambda: None
        self._last_resort: Callable[[str], None] = self.note
        self._thread = threading.Thread(target=self._run, name="mpillm-watch", daemon=True)
        self._thread.start()

    def tick(self) -> None:
        """Note that the main thread is in its event loop."""
        self._last_tick = time.monotonic()

    def enter(self, phase: Phase, limit_s: float) -> None:
        """Note that the main thread enters `phase`; after `limit_s` seconds in it, end the rank."""
        self.phase = phase
        self._limit = time.monotonic() + limit_s
        self.tick()

    def connect(
        self,
        send: Callable[[Beat], None],
        stop_requested: Callable[[], int | None],
        last_resort: Callable[[str], None],
        n_ranks: int,
    ) -> None:
        """Send heartbeats from now on.

        The watch's thread calls all three functions. `stop_requested` looks for a STOP that a hanging main
        thread does not read. `last_resort` receives the message when the limit has passed.
        """
        self._stop_requested = stop_requested
        self._last_resort = last_resort
        self._beat_interval_s = beat_interval_s(n_ranks)
        self._send = send

    def quiet(self) -> None:
        """Make no more calls and drop the limit: MPI is about to end."""
        with self._calling:
            self._send = None
            self._stop_requested = lambda: None
            self._limit = float("inf")

    def note(self, message: str) -> None:
        """Write a line to the process's original stderr, wherever stderr goes now."""
        os.write(self._stderr, f"mpillm: rank {self._rank}: {message}\n".encode())

    def main_stack(self) -> str:
        """Return the Python stack of the main thread, innermost call last."""
        frame = sys._current_frames().get(self._main or 0)
        frames = traceback.extract_stack(frame) if frame else []
        # The outer frames, up to the role or the core, are always the same.
        own = [i for i, entry in enumerate(frames) if entry.filename.startswith(_HERE)]
        inner = frames[own[-1] + 1 :] if own else []
        return "".join(traceback.format_list(inner or frames[-4:]))

    def _run(self) -> None:
        while True:
            time.sleep(_INTERVAL_S)
            now = time.monotonic()
            away = now - self._last_tick
            stalled = away > STALLED_S
            with self._calling:
                if self._send is not None and now >= self._beat_at:
                    self._beat_at = now + self._beat_interval_s - _INTERVAL_S / 2
                    self._send(Beat(self.phase, away, self.main_stack() if stalled else ""))
                code = self._stop_requested() if stalled else None
            if code is not None:
                print(
                    "stopped while the main thread was stuck in:",
                    self.main_stack(),
                    sep="\n",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(code)
            if now > self._limit:
                self._last_resort(
                    f"phase '{self.phase}' did not end within its deadline and its grace time\n"
                    f"{self.main_stack()}"
                )
                return
