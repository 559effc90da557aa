"""Stages with TensorRT-LLM's `quantize.py`, `convert_checkpoint.py` and `trtllm-build`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError, about
from launch.command import Command, NotHere, find_program
from mpillm.data.model_files import BuildConfig, EngineConfig
from mpillm.files import read_object
from mpillm.nvidia.configs import TrtllmHlApiConfig
from mpillm.options.fields import AllFields
from mpillm.options.mitten import HelpInfo, autoconfigure, bind, configured, overlaid
from mpillm.options.run_config import RunConfig
from mpillm.stages.checkpoint import (
    BUILD_SOURCE,
    CHECKPOINT_SOURCE,
    EngineLayout,
    QuantizerConfig,
    without_parallelism,
)
from mpillm.stages.operation import Operation, identity
from mpillm.stages.preconditions import EngineParallelism, check_divides, check_space, model_config, weights
from mpillm.trtllm.converters import LLAMA, Converter, converter_for
from mpillm.trtllm.installed import check_engines, check_gpus, find_script, python_with_trtllm
from mpillm.trtllm.tool_options import BUILD, QUANTIZE

_QUANTIZE_SCRIPT = ("examples/quantization/quantize.py",)
_BUILD_SCRIPT = ("tensorrt_llm/commands/build.py",)
# Bytes of a quantised checkpoint for each byte of its 16-bit source, unquantised layers included: is the disk
# large enough?
_SHRINK = {
    "nvfp4": 0.32,
    "int4_awq": 0.32,
    "int4_wo": 0.32,
    "w4a8_awq": 0.32,
    "fp8": 0.55,
    "int8_sq": 0.55,
    "int8_wo": 0.55,
}


@autoconfigure
@bind(AllFields.trtllm_lib_path, "lib_path")
@bind(AllFields.quantizer_lib_path_override, "quantizer_lib_path")
@dataclass
class TRTLLMLibraryLoader(EngineLayout):
    """The paths of TensorRT-LLM's tools, and the engine's layout."""

    lib_path: str | None = None
    quantizer_lib_path: str | None = None

    @about("trtllm_lib_path", "quantizer_lib_path_override")
    def script(self, candidates: Sequence[str], must: bool, quantizer: bool = False) -> list[str]:
        """Return the beginning of a script's command line. `must`: raise ConfigError if it is missing."""
        if quantizer and self.quantizer_lib_path:
            path = find_script(
                Path(self.quantizer_lib_path), candidates, "--quantizer_lib_path_override", must
            )
        else:
            path = find_script(
                Path(self.lib_path) if self.lib_path else None, candidates, "--trtllm_lib_path", must
            )
        return [python_with_trtllm(), str(path)]

    def build(self, must: bool) -> list[str]:
        """Return the beginning of `trtllm-build`'s command line, from --trtllm_lib_path if that is set."""
        if self.lib_path:
            return self.script(_BUILD_SCRIPT, must)
        try:
            return [
                find_program(
                    "trtllm-build", "install TensorRT-LLM, or name its repository with --trtllm_lib_path"
                )
            ]
        except NotHere:
            if must:
                raise
            return ["trtllm-build"]


class TRTLLMQuantizerOp(Operation):
    """Stage that writes a checkpoint or, with `export_hf`, a quantized Hugging Face folder."""

    name = "quantize"

    def __init__(
        self,
        config: QuantizerConfig | None = None,
        loader: TRTLLMLibraryLoader | None = None,
        *,
        export_hf: bool = False,
        deadline_s: float | None = None,
    ) -> None:
        self.config = config or QuantizerConfig()
        self.loader = loader or TRTLLMLibraryLoader(checkpoint_flags=self.config.sizes)
        self.deadline_s = deadline_s
        self.export_hf = export_hf
        assert self.config.model_path is not None
        self.model = Path(self.config.model_path)
        self.layout = self.loader.layout
        self.output = self.config.folder("hf" if export_hf else str(self.layout))
        if export_hf and not self._quantizes:
            raise ConfigError(
                f"{CHECKPOINT_SOURCE}: no qformat, and the PyTorch backend reads {self.model} as it is:"
                " there is nothing to make"
            )
        if self._quantizes and self.layout.ep_size > 1 and not export_hf:
            raise ConfigError(
                f"--moe_expert_parallelism {self.layout.ep_size}: quantize.py has no expert parallelism;"
                " leave out qformat, so that convert_checkpoint.py makes the checkpoint",
                about=["moe_expert_parallelism"],
            )

    @property
    def _quantizes(self) -> bool:
        return self.config.qformat != "full_prec"

    @about("trtllm_checkpoint_flags")
    def _arguments(self) -> list[str]:
        """Return the checked flags, without folders."""
        flags = dict(self.config.flags)
        layout = self.layout
        if self._quantizes:
            sizes = [] if self.export_hf else [f"--tp_size={layout.tp_size}", f"--pp_size={layout.pp_size}"]
            if self.export_hf:
                flags.setdefault("export_format", "hf")
            return [*sizes, *QUANTIZE.arguments(flags, CHECKPOINT_SOURCE)]
        flags.pop("qformat", None)
        converter = self._converter()
        return [
            *converter.sizes(layout),
            *converter.tool.arguments(flags, f"{CHECKPOINT_SOURCE} (without qformat)"),
        ]

    def _converter(self) -> Converter:
        """Return the script for the model's family; Llama's script without a model (see `check`)."""
        file = self.model / "config.json"
        return converter_for(read_object(file), str(self.model)) if file.is_file() else LLAMA

    def inputs(self) -> dict[str, Any]:
        head = self._head()
        return {
            "model": identity(self.model),
            "tool": head,
            "script": identity(Path(head[-1])),
            "flags": self._arguments(),
        }

    def _head(self, must: bool = False) -> list[str]:
        return self.loader.script(
            _QUANTIZE_SCRIPT if self._quantizes else self._converter().scripts, must, quantizer=True
        )

    def files(self) -> Sequence[str]:
        if self.export_hf:
            return ("config.json",)
        return ("config.json", *(f"rank{rank}.safetensors" for rank in range(self.layout.ranks)))

    def missing(self, folder: Path) -> list[str]:
        # The tool decides how many files a Hugging Face export has.
        return [*super().missing(folder), *([] if list(folder.glob("*.safetensors")) else ["*.safetensors"])]

    def commands(self, target: Path) -> Sequence[Command]:
        return (
            Command(
                (*self._head(), f"--model_dir={self.model}", f"--output_dir={target}", *self._arguments())
            ),
        )

    def check(self) -> None:
        self._head(must=True)
        config = model_config(self.model)
        if not self.export_hf:
            check_divides(config, self.layout)
        if self._quantizes and self.config.flags.get("device") != "cpu":
            check_gpus(1, "quantize.py, which calibrates,")
        size = sum(path.stat().st_size for path in weights(self.model))
        check_space(self.output, int(size * _SHRINK.get(self.config.qformat, 1.0)))


@autoconfigure
@bind(AllFields.trtllm_build_flags, "build_flags")
@bind(AllFields.engine_dir)
@bind(AllFields.max_batch_size)
@bind(AllFields.max_num_tokens)
@bind(AllFields.max_seq_len)
class TRTLLMBuilderOp(Operation):
    """From a checkpoint to an engine. TRTLLM_BUILD_FLAGS overrides the flags, from a caller or the field.

    A limit that the build flags do not set is the run's.
    """

    name = "build"

    def __init__(
        self,
        checkpoint: TRTLLMQuantizerOp | None = None,
        *,
        build_flags: Mapping[str, Any] | None = None,
        engine_dir: str | None = None,
        max_batch_size: int | None = None,
        max_num_tokens: int | None = None,
        max_seq_len: int | None = None,
        deadline_s: float | None = None,
    ) -> None:
        build_flags = overlaid(AllFields.trtllm_build_flags, build_flags)
        if checkpoint is None:
            config = QuantizerConfig()
            loader = TRTLLMLibraryLoader(checkpoint_flags=config.sizes, build_flags=build_flags)
            checkpoint = TRTLLMQuantizerOp(config, loader, deadline_s=deadline_s)
        self.checkpoint = checkpoint
        self.loader = self.checkpoint.loader
        self.dependencies = (self.checkpoint,)
        self.deadline_s = deadline_s
        self.layout = self.loader.layout
        flags = {
            "max_batch_size": max_batch_size,
            "max_num_tokens": max_num_tokens,
            "max_seq_len": max_seq_len,
        }
        flags["workers"] = self.layout.ranks if self.layout.ranks > 1 else None
        self.build_flags = {
            name: value
            for name, value in (flags | without_parallelism(build_flags)).items()
            if value is not None
        }
        self.output = Path(engine_dir) if engine_dir else Path("build/engines") / self.checkpoint.output.name

    def inputs(self) -> dict[str, Any]:
        head = self.loader.build(must=False)
        return {"tool": head, "script": identity(Path(head[-1])), "flags": self._arguments()}

    @about("trtllm_build_flags")
    def _arguments(self) -> list[str]:
        return BUILD.arguments(self.build_flags, BUILD_SOURCE)

    def files(self) -> Sequence[str]:
        return engine_files(self.layout)

    def commands(self, target: Path) -> Sequence[Command]:
        folders = (f"--checkpoint_dir={self.checkpoint.output}", f"--output_dir={target}")
        return (Command((*self.loader.build(must=False), *folders, *self._arguments())),)

    @about("trtllm_build_flags")
    def check(self) -> None:
        self.loader.build(must=True)
        check_gpus(1, "trtllm-build")
        longest, prompt = self.build_flags.get("max_seq_len"), self.build_flags.get("max_input_len")
        if longest is not None and prompt is not None and prompt >= longest:
            raise ConfigError(
                f"{BUILD_SOURCE}: max_input_len {prompt} leaves no token of max_seq_len {longest} for"
                " the answer"
            )
        size = sum(path.stat().st_size for path in weights(self.checkpoint.model))
        check_space(self.output, int(size * _SHRINK.get(self.checkpoint.config.qformat, 1.0)))


HelpInfo.add_configurator_dependencies(TRTLLMQuantizerOp, (QuantizerConfig, TRTLLMLibraryLoader))
HelpInfo.add_configurator_dependencies(TRTLLMBuilderOp, (TRTLLMQuantizerOp,))


def engine_stages(config: RunConfig) -> Operation:
    """Return the stages for cores that execute an engine of `trtllm-build`.

    Raises ConfigError if the installed release has no such tool.
    """
    check_engines(f"--core_type {config.core_type}")
    _check_unsupported(config)
    return TRTLLMBuilderOp(deadline_s=config.build_deadline)


def checkpoint_stages(config: RunConfig) -> Operation:
    """Return the stages for cores that read a Hugging Face folder or, with trtllm_backend:cpp, an engine."""
    if configured(TrtllmHlApiConfig, config).backend_type != "pytorch":
        return engine_stages(config)
    _check_unsupported(config)
    return TRTLLMQuantizerOp(export_hf=True, deadline_s=config.build_deadline)


def _check_unsupported(config: RunConfig) -> None:
    for name, flag in (("dtype", "dtype"), ("quantization", "qformat")):
        if config.is_user_set(name) and getattr(config, name) != "auto":
            raise ConfigError(
                f"{config.named(name)}: {config.core_type} does not take it; use {CHECKPOINT_SOURCE}={flag}:…"
            )


def engine_files(layout: EngineParallelism) -> tuple[str, ...]:
    """Return the files of an engine: `trtllm-build` writes one for each rank."""
    return ("config.json", *(f"rank{rank}.engine" for rank in range(layout.ranks)))


@about("engine_dir")
def read_engine(folder: Path) -> tuple[BuildConfig, EngineParallelism]:
    """Return the build configuration of an existing engine, and its layout.

    Raises ConfigError if it is incomplete.
    """
    if not folder.is_dir():
        raise NotHere(f"--engine_dir {folder}: no such folder; generate-engines makes it")
    engine = EngineConfig.from_engine_dir(folder)
    mapping = engine.pretrained_config.mapping
    layout = EngineParallelism(mapping.tp_size, mapping.pp_size, max(1, mapping.moe_ep_size))
    for name in engine_files(layout):
        if not (folder / name).is_file():
            raise ConfigError(
                f"--engine_dir {folder}: there is no {name} in it, and its config.json says {layout}"
            )
    return engine.build_config, layout
