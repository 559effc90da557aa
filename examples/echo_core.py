"""A complete core that answers each prompt with the reversed prompt, cut to the maximum output length.

    PYTHONPATH=examples mpirun -n 3 python -m mpillm run --core_type echo_core:EchoCore

An installed package gives its core a name, `--core_type echo`, by an entry point in its pyproject.toml:

    [project.entry-points."mpillm.cores"]
    echo = "echo_core:EchoCore"
"""

from __future__ import annotations

from collections import deque

import numpy as np

from mpillm.comms.messages import RESPONSE, Batch, ResponseFlag
from mpillm.cores.base import Credits, LLMCore


class EchoCore(LLMCore):
    """Core that runs on every rank of an instance. Only the instance's root rank receives requests."""

    def load(self) -> None:
        """Load weights or connect to a server here."""
        self._waiting: deque[Batch] = deque()

    def run_health_check(self) -> None:
        """Raise here if the backend does not answer."""

    def credits(self) -> Credits:
        """Return the credits: what the leader may send before answers return."""
        return Credits(requests=self.config.engine.scheduler.max_batch_size, tokens=1 << 20)

    def enqueue(self, requests: Batch) -> None:
        self._waiting.extend(requests.split())

    def has_work(self) -> bool:
        return bool(self._waiting)

    def poll_responses(self) -> Batch | None:
        """Return at most one answer per call, because the rank's event loop waits for this method."""
        if not self._waiting:
            return None
        request = self._waiting.popleft()
        (row,) = request.rows
        tokens = request.tokens[::-1][: row["max_output"]].astype(np.int32)
        flags = ResponseFlag.FIRST | ResponseFlag.FINAL  # one piece with the first and the last token
        return Batch(np.array([(row["id"], len(tokens), flags)], RESPONSE), tokens)
