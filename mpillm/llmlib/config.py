"""The configurations of cores: the classes of `mpillm.nvidia.backends`, each with its `gen_config`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeVar

from mpillm.nvidia import backends
from mpillm.nvidia.backends import TrtllmHarnessConfig as TrtllmHarnessConfig
from mpillm.nvidia.configs import TritonHarnessConfig as TritonHarnessConfig
from mpillm.nvidia.configs import TrtllmEndpointConfig as TrtllmEndpointConfig
from mpillm.nvidia.configs import TrtllmExecutorConfig as TrtllmExecutorConfig
from mpillm.nvidia.configs import TrtllmHlApiConfig as TrtllmHlApiConfig
from mpillm.options.fields import AllFields
from mpillm.options.generation_config import GenerationConfig as GenerationConfig
from mpillm.options.mitten import autoconfigure, bind, current

C = TypeVar("C", bound=backends.HarnessConfig)


@autoconfigure
@bind(AllFields.end_ids)
@bind(AllFields.max_output_len)
@bind(AllFields.min_output_len)
@bind(AllFields.beam_width)
@bind(AllFields.temperature)
@bind(AllFields.top_k)
@bind(AllFields.top_p)
@bind(AllFields.stop_words)
@dataclass
class _ActiveGeneration:
    """Generation parameters of the active configuration."""

    end_ids: tuple[int, ...] | None = None
    max_output_len: int = GenerationConfig.max_output_len
    min_output_len: int = GenerationConfig.min_output_len
    beam_width: int = GenerationConfig.runtime_beam_width
    temperature: float = GenerationConfig.temperature
    top_k: int = GenerationConfig.top_k
    top_p: float = GenerationConfig.top_p
    stop_words: tuple[object, ...] | None = None


def with_generation(config: C) -> C:
    """Add a `gen_config` to `config`, from its file or, in a run, from the active configuration."""
    if config.gen_config is None or AllFields.max_output_len in (current() or {}):
        values = _ActiveGeneration()
        config.gen_config = GenerationConfig(
            eos_token_id=values.end_ids or (),
            max_output_len=values.max_output_len,
            min_output_len=values.min_output_len,
            runtime_beam_width=values.beam_width,
            temperature=values.temperature,
            top_k=values.top_k,
            top_p=values.top_p,
            use_stop_tokens=bool(values.stop_words),
        )
    config.gen_config = dataclasses.replace(config.gen_config, streaming=config.streaming)
    return config


@autoconfigure
@dataclass
class HarnessConfig(backends.HarnessConfig):
    """Common configuration of all backends, with the `gen_config` of a file or of the options."""

    def __post_init__(self) -> None:
        super().__post_init__()
        with_generation(self)
