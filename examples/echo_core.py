"""A complete core: it answers each prompt with the prompt backwards, cut to the longest answer.

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
    """Runs on every rank of an instance; only the instance's leader receives requests."""

    def load(self) -> None:
        """Load weights or connect to a server here."""
        self._waiting: deque[Batch] = deque()

    def run_health_check(self) -> None:
        """Raise here if the backend does not answer."""

    def credits(self) -> Credits:
        """What the leader may send before answers return."""
        return Credits(requests=self.config.max_batch_size, tokens=1 << 20)

    def enqueue(self, requests: Batch) -> None:
        self._waiting.extend(requests.split())

    def has_work(self) -> bool:
        return bool(self._waiting)

    def poll_responses(self) -> Batch | None:
        """One answer per call: this must return soon, so that the rank can answer others."""
        if not self._waiting:
            return None
        request = self._waiting.popleft()
        (row,) = request.rows
        tokens = request.tokens[::-1][: row["max_output"]].astype(np.int32)
        flags = ResponseFlag.FIRST | ResponseFlag.FINAL  # first and last token at once: nothing is streamed
        return Batch(np.array([(row["id"], len(tokens), flags)], RESPONSE), tokens)
