"""The runs of ``bench table``: their options, how many samples run at once in them, and what GPUs drew."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from disagg.errors import ConfigError
from mpillm.config.core_config import CoreConfig
from mpillm.config.disagg_values import CORE
from mpillm.cores.torch_core import TorchCore
from mpillm.engine.model.model_info import model_info
from mpillm.report.page.facts import floats
from mpillm.report.run_directory import TELEMETRY
from mpillm.runs.whole_runs import run_in


class Drawn(NamedTuple):
    """Means over the GPUs, in the test; NaN if no driver said them."""

    watts: float = math.nan
    sm_mhz: float = math.nan
    peak_bytes: float = math.nan  # of memory, in use


def fit_at_once(options: Mapping[str, Any], n_ranks: int) -> int:
    """Return how many samples of a run fit at once, to their ends, into its instances' KV caches.

    `options`: of the run, by name. Raises ConfigError if the model does not fit a GPU, or does not exist.
    """
    tp_size, pp_size = (int(options.get(f"{name}_parallelism", 1)) for name in ("tensor", "pipeline"))
    gpus = TorchCore.gpus() if options.get("device") != "cpu" else ()
    names = {place.field.name: place.in_core or place.field.name for place in CORE}
    core = CoreConfig(
        core_type="torch",
        model_path=options["model_path"],
        quantization=options["quantization"],
        gpu_bytes=min((gpu.free for gpu in gpus), default=None),
        tp_size=tp_size,
        pp_size=pp_size,
        **{names[name]: value for name, value in options.items() if name in names},
    )
    n_blocks = model_info(core).kv_cache_tokens // core.tokens_per_block
    fit = n_blocks // math.ceil(int(options["max_seq_len"]) / core.tokens_per_block)
    return min(fit, core.max_batch_size) * ((n_ranks - 1) // (tp_size * pp_size))


def run(options: Mapping[str, Any], n_ranks: int, deadline_s: float) -> tuple[dict[str, Any], Drawn]:
    """Return the run's `result.json`, and what its GPUs drew.

    Of a run without a result, a status and its last lines.
    """
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with tempfile.TemporaryDirectory(prefix="mpillm-table-") as folder:
        path = Path(folder) / "run"
        try:
            ended = run_in(path, ("-n", str(n_ranks)), words, deadline_s=deadline_s)
        except ConfigError as error:
            return failed(str(error)), Drawn()
        if not ended.result:
            last = [line.lstrip(" |") for line in ended.tail.splitlines()[-2:]]
            return failed(": ".join(last) or f"exit code {ended.code}"), Drawn()
        try:
            telemetry = json.loads((path / TELEMETRY).read_text(encoding="utf-8"))
        except FileNotFoundError:  # of a run that failed
            return ended.result, Drawn()
        return ended.result, _drawn(telemetry)


def failed(cause: str) -> dict[str, Any]:
    return {"status": "FAILED", "failures": [{"cause": cause}]}


def _drawn(telemetry: Mapping[str, Any]) -> Drawn:
    """Return what telemetry.json says of the test."""
    found = []
    for rank in telemetry["ranks"].values():
        begin, end = next(ends for name, *ends in rank["phases"] if name == "test")
        if gpu := rank["samples"].get("gpu"):
            at, *columns = (floats(gpu[name]) for name in ("seconds", "energy_j", "sm_mhz", "memory_bytes"))
            inside = (begin <= at) & (at <= end)
            if inside.sum() > 1:
                at, joules, mhz, used = (column[inside] for column in (at, *columns))
                found.append((float((joules[-1] - joules[0]) / (at[-1] - at[0])), mhz.mean(), used.max()))
    return Drawn(*map(float, np.mean(found, axis=0))) if found else Drawn()
