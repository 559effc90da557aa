"""The options of the dummy core, --core_options: its times, lengths and faults."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from disagg.errors import ConfigError, about, nearest
from mpillm.comms.messages import Batch
from mpillm.cores.base import check_option_names
from mpillm.phases import Phase

_FAULTS = ("none", "raise", "hang", "exit", "slow", "silent")
_KINDS: dict[str, Callable[..., object]] = {"float": float, "int": int, "str": str}
_PHASES: tuple[Phase, ...] = ("join", "load", "health", "warmup", "test")


@dataclass(frozen=True)
class DummyOptions:
    """--core_options of the dummy core: ``key:value,key:value``."""

    ttft_ms: float = 0.0  # time to first token
    tpot_ms: float = 0.0  # time per further token
    # answer lengths: normally distributed, at most the request's max_output; mean 0: always max_output
    output_mean: float = 0.0
    output_stdev: float = 0.0
    kv_bytes_per_token: int = 0
    load_s: float = 0.0
    # raise, hang, exit (the process dies), slow (sleeps fault_s), silent (the request is never answered)
    fault: str = "none"
    fault_rank: int = -1  # in the world; -1: every rank with this core
    fault_phase: str = "test"
    fault_at: int = 1  # in the test: at the n-th request of this rank
    fault_s: float = 3600.0

    @staticmethod
    @about("core_options")
    def from_options(options: dict[str, object]) -> DummyOptions:
        known = DummyOptions.__dataclass_fields__
        values: dict[str, object] = {}
        check_option_names(options, known, "the dummy core")
        for key, value in options.items():
            kind: Callable[[object], object] = _KINDS[str(known[key].type)]
            try:
                values[key] = read = kind(value)
                if (
                    isinstance(read, (int, float))
                    and not (-1 if key == "fault_rank" else 0) <= read < math.inf
                ):
                    raise ValueError
            except (OverflowError, TypeError, ValueError):
                raise ConfigError(f"--core_options {key}:{value}: not a number of at least 0") from None
        parsed = DummyOptions(**values)  # type: ignore[arg-type]
        for name, value, allowed in (
            ("fault", parsed.fault, _FAULTS),
            ("fault_phase", parsed.fault_phase, _PHASES),
        ):
            if value not in allowed:
                raise ConfigError(
                    f"--core_options {name}:{value}: not one of {', '.join(allowed)}{nearest(value, allowed)}"
                )
        return parsed


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
        """Count requests from now on: warm-up requests do not count."""
        self._in_test = True

    def at_requests(self, requests: Batch) -> Batch:
        """Fail if the fault is at one of these requests; return the requests to answer."""
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
