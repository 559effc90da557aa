"""Options that a disaggregation YAML states, and the cores that come of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import disagg
from disagg import DisaggConfig
from mpillm.cores.base import CoreConfig
from mpillm.options.disagg_values import CORE, ROUTER
from mpillm.options.disagg_yaml import disagg_config
from mpillm.options.options import parse_run
from mpillm.options.run_config import RunConfig
from mpillm.runtime.core_configs import check_flags, core_configs, effective_yaml

TORCH = ["--core_type", "torch"]
PLACES = {place.field.name: place for place in (*CORE, ROUTER)}


def section(**values: Any) -> dict[str, Any]:
    """Return a section with these options' values in their places."""
    made: dict[str, Any] = {}
    for name, value in values.items():
        *outer, last = PLACES[name].key
        into = made
        for key in outer:
            into = into.setdefault(key, {})
        into[last] = value
    return made


def given(file: Path, *options: str, core: list[str] = TORCH, **content: Any) -> RunConfig:
    file.write_text(json.dumps(content))
    return parse_run([*core, "--disagg_config", str(file), *options])


def cores(config: RunConfig, ranks: int) -> tuple[DisaggConfig, list[CoreConfig]]:
    yaml = disagg_config(config, ranks)
    plan = disagg.plan(yaml, ranks)
    check_flags(config, plan)
    made = core_configs(config, plan, [instance.root_rank for instance in plan.instances], {})
    return effective_yaml(config, yaml, plan, made), made
