"""The phases of a run, in order; all ranks do each together."""

from __future__ import annotations

from typing import Literal, get_args

Phase = Literal["join", "load", "health", "warmup", "ready", "test", "drain", "stop"]
PHASES: tuple[Phase, ...] = get_args(Phase)
