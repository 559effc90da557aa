"""Configurations of engines for tests; fields of their schedulers are named like their own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from mpillm.engine.shape.engine_config import EngineConfig, SchedulerConfig


def engine_config(model_path: Path | str | None = None, **options: Any) -> EngineConfig:
    return changed(EngineConfig(model_path=None if model_path is None else str(model_path)), **options)


def changed(config: EngineConfig, **options: Any) -> EngineConfig:
    """Return `config` with other values."""
    own = {name: options.pop(name) for name in vars(SchedulerConfig()) if name in options}
    return dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, **own), **options)
