"""The options of the dummy core, --core_options: its times, lengths and faults."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from disagg.errors import ConfigError, about, nearest
from mpillm.phases import Phase

_FAULTS = ("none", "raise", "hang", "exit", "slow", "silent")
_KINDS: dict[str, Callable[..., object]] = {"float": float, "int": int, "str": str}
_PHASES: tuple[Phase, ...] = ("join", "load", "health", "warmup", "test")


@dataclass(frozen=True)
class DummyOptions:
    """--core_options of the dummy core, as ``key:value,key:value``."""

    ttft_ms: float = 0.0  # time to first token
    tpot_ms: float = 0.0  # time per further token
    # answer lengths: normal, at most the request's max_output; 0 is always max_output
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
        for key, value in options.items():
            if key not in known:
                raise ConfigError(
                    f"--core_options {key}: the dummy core has no such option{nearest(key, known)};"
                    f" it has: {', '.join(known)}"
                )
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
        made = DummyOptions(**values)  # type: ignore[arg-type]
        for name, value, allowed in (
            ("fault", made.fault, _FAULTS),
            ("fault_phase", made.fault_phase, _PHASES),
        ):
            if value not in allowed:
                raise ConfigError(
                    f"--core_options {name}:{value}: not one of {', '.join(allowed)}{nearest(value, allowed)}"
                )
        return made
