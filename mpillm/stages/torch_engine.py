"""Checkpoints and engines of the torch core: 8-bit weights, or weights by rank; see `torch_stage`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError, about, nearest
from launch.command import Command
from mpillm.engine.shape.find_model import PRESETS
from mpillm.files import read_object
from mpillm.options.fields import AllFields
from mpillm.options.fields.runtime_flags import OUR_BUILD_FLAGS, OUR_CHECKPOINT_FLAGS
from mpillm.options.mitten import HelpInfo, autoconfigure, bind
from mpillm.options.run_config import RunConfig
from mpillm.stages.checkpoint import (
    BUILD_SOURCE,
    CHECKPOINT_SOURCE,
    EngineLayout,
    QuantizerConfig,
    without_parallelism,
)
from mpillm.stages.operation import Operation, identity
from mpillm.stages.preconditions import check_divides, check_space, model_config, weights

# TensorRT-LLM's names of formats, and the torch core's names.
ALGORITHMS = {"int8_wo": "int8", "int8": "int8", "fp8": "fp8", "full_prec": "none"}
_CALIBRATION_PROMPTS = 64


def _stage(*args: object) -> Command:
    return Command((sys.executable, "-m", "mpillm.cores.torch_stage", *map(str, args)))


def _check_flags(source: str, flags: Iterable[str], known: Sequence[str]) -> None:
    for flag in flags:
        if flag not in known:
            others = f"{nearest(flag, known)}; it has {', '.join(known)}"
            raise ConfigError(f"{source}: the torch core has no flag '{flag}'{others}")


class TorchQuantizerOp(Operation):
    """Stage that adds 8-bit weights (`qformat`) or KV scales (`kv_cache_dtype`) to a Hugging Face folder."""

    name = "quantize"

    @about("trtllm_checkpoint_flags")
    def __init__(self, config: QuantizerConfig | None = None, *, deadline_s: float | None = None) -> None:
        self.config = config or QuantizerConfig()
        self.deadline_s = deadline_s
        flags = self.config.flags
        _check_flags(CHECKPOINT_SOURCE, flags, OUR_CHECKPOINT_FLAGS)
        if (dtype := flags.get("kv_cache_dtype")) not in (None, "fp8"):
            raise ConfigError(f"{CHECKPOINT_SOURCE}: kv_cache_dtype {dtype}: the torch core has only fp8")
        size = flags.get("calib_size", _CALIBRATION_PROMPTS)
        if type(size) is not int or size < 1:
            where = f"{CHECKPOINT_SOURCE}: calib_size {size}"
            raise ConfigError(f"{where}: expected a whole number of at least 1")
        self.calibration = [size] if dtype else []  # prompts
        if (qformat := self.config.qformat) not in ALGORITHMS:
            known = ", ".join(ALGORITHMS) + nearest(qformat, ALGORITHMS)
            raise ConfigError(f"{CHECKPOINT_SOURCE}: qformat {qformat}: the torch core has {known}")
        self.algorithm = ALGORITHMS[qformat]
        assert self.config.model_path is not None
        self.model = Path(self.config.model_path)
        self.output = self.config.folder("kv_fp8-hf" if self.calibration else "hf")

    def inputs(self) -> dict[str, Any]:
        return {"model": identity(self.model), "algorithm": self.algorithm, "calibration": self.calibration}

    def files(self) -> Sequence[str]:
        return ("config.json", *(path.name for path in weights(self.model)))

    def commands(self, target: Path) -> Sequence[Command]:
        return (_stage("quantize", self.model, target, self.algorithm, *self.calibration),)

    @about("model_path")
    def check(self) -> None:
        if not self.model.exists() and (PRESETS / f"{self.model}.json").is_file():
            raise ConfigError(
                f"--model_path {self.model}: a preset has random weights and no file to quantize; name"
                " a folder"
            )
        model_config(self.model)
        check_space(self.output, sum(path.stat().st_size for path in weights(self.model)))


@autoconfigure
@bind(AllFields.trtllm_build_flags, "build_flags")
@bind(AllFields.engine_dir)
@bind(AllFields.dtype)
@bind(AllFields.quantization)
class TorchBuilderOp(Operation):
    """Stage that writes the weights of each rank of an instance, from a checkpoint or a preset."""

    name = "build"

    @about("trtllm_build_flags", "quantization")
    def __init__(
        self,
        quantizer: TorchQuantizerOp | None = None,
        *,
        build_flags: Mapping[str, Any] | None = None,
        engine_dir: str | None = None,
        dtype: str = "auto",
        quantization: str = "auto",
        deadline_s: float | None = None,
    ) -> None:
        config = quantizer.config if quantizer else QuantizerConfig()
        assert config.model_path is not None
        self.dependencies = (quantizer,) if quantizer else ()
        self.deadline_s = deadline_s
        self.source = Path(config.model_path)  # has the same shape as the quantized checkpoint
        self.checkpoint = quantizer.output if quantizer else self.source
        self.layout = EngineLayout().layout
        self.dtype = dtype
        self.quantization = quantization
        if quantizer and quantization not in ("auto", quantizer.algorithm):
            of_flags = f"{CHECKPOINT_SOURCE}: qformat {config.qformat}"
            raise ConfigError(f"--quantization {quantization}, but {of_flags}")
        self.limits = without_parallelism(build_flags or {})
        _check_flags(BUILD_SOURCE, self.limits, OUR_BUILD_FLAGS)
        weights_are = config.qformat if quantizer or quantization == "auto" else quantization
        weights_are += "-kv_fp8" if quantizer and quantizer.calibration else ""
        name = f"{self.source.name}-{weights_are}-torch-{self.layout}"
        self.output = Path(engine_dir) if engine_dir else Path("build/engines") / name

    def inputs(self) -> dict[str, Any]:
        checkpoint = None if self.dependencies else identity(self.checkpoint)
        return {
            "checkpoint": checkpoint or str(self.checkpoint),
            "layout": str(self.layout),
            "dtype": self.dtype,
            "quantization": self.quantization,
            "limits": dict(self.limits),
        }

    def files(self) -> Sequence[str]:
        return ("config.json", *(f"rank{rank}.safetensors" for rank in range(self.layout.ranks)))

    def commands(self, target: Path) -> Sequence[Command]:
        sizes = (self.layout.tp_size, self.layout.pp_size, self.layout.ep_size)
        limits = [f"{name}:{value}" for name, value in self.limits.items()]
        return (_stage("build", self.checkpoint, target, *sizes, self.dtype, self.quantization, *limits),)

    def check(self) -> None:
        preset = PRESETS / f"{self.source}.json"
        is_preset = not self.source.exists() and preset.is_file()
        check_divides(read_object(preset) if is_preset else model_config(self.source), self.layout)
        if not is_preset:
            check_space(self.output, sum(path.stat().st_size for path in weights(self.source)))


HelpInfo.add_configurator_dependencies(TorchQuantizerOp, (QuantizerConfig,))
HelpInfo.add_configurator_dependencies(TorchBuilderOp, (TorchQuantizerOp, EngineLayout))


def engine_stages(config: RunConfig) -> Operation:
    """Return the build stage, after a quantization stage if the flags need it."""
    deadline_s = config.build_deadline
    checkpoint = QuantizerConfig()
    quantizes = checkpoint.qformat != "full_prec" or "kv_cache_dtype" in checkpoint.flags
    quantizer = TorchQuantizerOp(deadline_s=deadline_s) if quantizes else None
    return TorchBuilderOp(quantizer, deadline_s=deadline_s)
