"""Configuration of an engine's build for every core: a checkpoint with its flags, and a layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError, about
from mpillm.options.fields import AllFields
from mpillm.options.mitten import autoconfigure, bind, overlaid
from mpillm.stages.preconditions import EngineParallelism

PARALLELISM = {
    "tp_size": "tensor_parallelism",
    "pp_size": "pipeline_parallelism",
    "moe_ep_size": "moe_expert_parallelism",
}
"""The tools' names, and mpillm's names."""

CHECKPOINT_SOURCE = "--trtllm_checkpoint_flags"
BUILD_SOURCE = "--trtllm_build_flags"


@autoconfigure
@bind(AllFields.tensor_parallelism, "tp_size")
@bind(AllFields.pipeline_parallelism, "pp_size")
@bind(AllFields.moe_expert_parallelism, "ep_size")
@bind(AllFields.trtllm_checkpoint_flags, "checkpoint_flags")
@bind(AllFields.trtllm_build_flags, "build_flags")
@dataclass
class EngineLayout:
    """An engine's layout.

    Options and both flag strings may set the sizes, with mpillm's name (`tensor_parallelism`) or the tools'
    name (`tp_size`). All values must agree.
    """

    tp_size: int | None = None
    pp_size: int | None = None
    ep_size: int | None = None
    checkpoint_flags: Mapping[str, Any] = field(default_factory=dict)
    build_flags: Mapping[str, Any] = field(default_factory=dict)
    layout: EngineParallelism = field(init=False)

    def __post_init__(self) -> None:
        options = zip(PARALLELISM, (self.tp_size, self.pp_size, self.ep_size), strict=True)
        self.layout = EngineParallelism(*(self._size(native, size) for native, size in options))

    @about(*PARALLELISM.values(), "trtllm_checkpoint_flags", "trtllm_build_flags")
    def _size(self, native: str, value: int | None) -> int:
        option = PARALLELISM[native]
        places: dict[str, Any] = {f"--{option}": value}
        for source, flags in ((CHECKPOINT_SOURCE, self.checkpoint_flags), (BUILD_SOURCE, self.build_flags)):
            places |= {f"{source}: {name}": flags.get(name) for name in (option, native)}
        sizes = [(place, size) for place, size in places.items() if size is not None]
        for place, size in sizes:
            if type(size) is not int or size < 1:
                raise ConfigError(f"{place} {size}: expected a whole number of at least 1")
            if size != sizes[0][1]:
                raise ConfigError(f"{place} {size}, but {sizes[0][0]} {sizes[0][1]}")
        return sizes[0][1] if sizes else 1


_SIZES = {*PARALLELISM, *PARALLELISM.values()}


def without_parallelism(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that `EngineLayout` does not read."""
    return {name: value for name, value in flags.items() if name not in _SIZES}


@autoconfigure
@bind(AllFields.model_path)
@bind(AllFields.llm_quantizer_outdir, "output_path")
@bind(AllFields.trtllm_checkpoint_flags, "flags")
@dataclass
class QuantizerConfig:
    """The source and the folder of a checkpoint, and the flags of the tool that writes it.

    With the flag `qformat`, the tool quantizes the weights. TRTLLM_CHECKPOINT_FLAGS overrides the flags.
    """

    model_path: str | None = None
    output_path: str | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    # parallelism in the flags, for `EngineLayout`
    sizes: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        if not self.model_path:
            raise ConfigError("generate-engines needs --model_path: the Hugging Face folder of the model")
        flags = overlaid(AllFields.trtllm_checkpoint_flags, self.flags)
        self.flags = without_parallelism(flags)
        self.sizes = {name: value for name, value in flags.items() if name in _SIZES}

    @property
    def qformat(self) -> str:
        """The format in the flags, or full_prec."""
        return str(self.flags.get("qformat", "full_prec"))

    def folder(self, layout: str) -> Path:
        """Return `output_path`, or a folder in build/checkpoints named by model, format and layout."""
        if self.output_path:
            return Path(self.output_path)
        assert self.model_path is not None
        return Path("build/checkpoints") / f"{Path(self.model_path).name}-{self.qformat}-{layout}"
