"""The embedded engine behind Triton: its parameters in `config.pbtxt`, and generated `model.py` files."""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from launch.command import NotHere
from mpillm.data.model_files import BuildConfig
from mpillm.options.disagg_values import CORE
from mpillm.options.run_config import RunConfig
from mpillm.triton.tritonserver import find_tritonserver, triton_prefix

PYTHON = "python"
"""The `triton_backend` of the embedded engine."""

_MODULES = {
    "preprocessing": "preprocessing",
    "postprocessing": "postprocessing",
    "tensorrt_llm_bls": "bls",
}
_PROGRAM = '''"""Written by mpillm generate-triton-config, for a tritonserver with Python {version}."""

import site
import sys

# Before the packages of the server's own Python: its NumPy may not fit.
known = [*sys.path]
site.addsitedir({packages!r})
sys.path.sort(key=known.__contains__)

from mpillm.triton.models.{module} import TritonPythonModel
'''


def embedded_parameters(config: RunConfig) -> tuple[str, BuildConfig, int, dict[str, str]]:
    """Return the engine's or model's folder, limits, ranks per model, and parameters of `config.pbtxt`."""
    if not config.model_path:
        raise ConfigError(f"triton_backend:{PYTHON} needs --model_path", about=["model_path"])
    if (stages := config.pipeline_parallelism or 1) > 1:
        raise ConfigError(
            f"--pipeline_parallelism {stages}: behind Triton the embedded engine has one stage",
            about=["pipeline_parallelism"],
        )
    n_ranks = config.tensor_parallelism or 1
    model = _absolute(config.model_path)
    values = {place.field.name: config[place.field] for place in CORE} | {
        "model_path": model,
        "quantization": config.quantization,
        "engine_dir": config.engine_dir and _absolute(config.engine_dir),
        "end_ids": config.end_ids,
        "n_threads": config.num_threads,
        "tp_size": n_ranks,
        "ep_size": config.moe_expert_parallelism,
    }
    # The engine has defaults for the fields without a value.
    set_values = {name: value for name, value in values.items() if value is not None}
    parameters = {
        "gpt_model_path": values["engine_dir"] or model,
        "tokenizer_dir": model if Path(model).is_dir() else "",
        "core_config": json.dumps(set_values, default=list),
        # its environment has the MPI library, and it runs the spawned ranks
        "executor_worker_path": sys.executable,
    }
    build = BuildConfig(max_batch_size=config.max_batch_size or _DEFAULT_BATCH, max_beam_width=_MAX_BEAMS)
    return config.engine_dir or config.model_path, build, n_ranks, parameters


_DEFAULT_BATCH = 64
_MAX_BEAMS = 4


def _absolute(path: str) -> str:
    """Return the absolute path of a folder, because tritonserver may run elsewhere; keep a preset's name."""
    return str(Path(path).absolute()) if Path(path).is_dir() else path


def model_program(config: Mapping[str, Any]) -> str | None:
    """Return the `model.py` of a model; None for a model of another backend."""
    if config.get("backend") != PYTHON:
        return None
    module = _MODULES.get(config["name"], "embedded")
    return _PROGRAM.format(version=sysconfig.get_python_version(), packages=site_packages(), module=module)


def numpy_note() -> str:
    """Return a note if the models' Python has a NumPy that is too new for some servers; "" otherwise."""
    numpy = next(iter(distributions(name="numpy", path=[site_packages()])), None)
    if numpy is None or int(numpy.version.partition(".")[0]) < 2:
        return ""
    return (
        f"models find NumPy {numpy.version} in {site_packages()}: a tritonserver whose Python backend was"
        " made for NumPy 1 hands them tensors with wrong contents, without an error; make triton installs one"
        " below 2"
    )


def check_installed() -> str | None:
    """Return a problem of this machine's tritonserver; "" if there is none, None without a tritonserver."""
    try:
        find_tritonserver(None)
    except NotHere:
        return None
    return numpy_note()


def site_packages() -> str:
    """Return the packages of the environment that `make triton` creates, or of this one if there is none."""
    own = Path(sysconfig.get_path("purelib"))
    triton = triton_prefix() / own.relative_to(sys.prefix)
    return str(triton if triton.is_dir() else own)
