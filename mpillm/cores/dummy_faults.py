"""The faults that the dummy core's options ask for."""

from __future__ import annotations

import os
import time

import numpy as np

from mpillm.comms.messages import Batch
from mpillm.cores.dummy_options import DummyOptions
from mpillm.phases import Phase


class Faults:
    """Makes this rank fail in the phase that the options name, or at the n-th request of the test."""

    def __init__(self, options: DummyOptions, rank: int) -> None:
        self._options = options
        self._phase = None
        if options.fault != "none" and options.fault_rank in (-1, rank):
            self._phase = options.fault_phase
        self._in_test = False
        self._n_requests = 0  # of the test

    def in_phase(self, phase: Phase) -> None:
        """Fail if it is in this phase."""
        if self._phase == phase:
            self._fault(phase)

    def start_test(self) -> None:
        """Count requests from now on: those of the warm-up do not count."""
        self._in_test = True

    def at_requests(self, requests: Batch) -> Batch:
        """Fail if it is at one of these requests; return those that are to be answered."""
        if not self._in_test or self._phase != "test":
            return requests
        nth = self._options.fault_at - 1 - self._n_requests
        self._n_requests += len(requests)
        if self._options.fault == "slow" and nth < len(requests):
            time.sleep(self._options.fault_s)
        elif 0 <= nth < len(requests):
            if self._options.fault == "silent":
                return requests.select(np.arange(len(requests)) != nth)
            self._fault(f"the test, at request {self._options.fault_at}")
        return requests

    def _fault(self, where: str) -> None:
        match self._options.fault:
            case "raise":
                raise RuntimeError(f"injected fault in {where}")
            case "exit":
                os.kill(os.getpid(), 9)
            case "hang" | "slow":
                time.sleep(self._options.fault_s)
