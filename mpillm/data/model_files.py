"""The configuration file of a TensorRT-LLM engine, as far as mpillm reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from disagg.errors import ConfigError, about
from mpillm.json_slice import Slice

# Defaults are those of TensorRT-LLM's BuildConfig in NVIDIA's harness.


@dataclass(frozen=True)
class PluginConfig(Slice):
    use_paged_context_fmha: bool = True


@dataclass(frozen=True)
class BuildConfig(Slice):
    max_input_len: int = 1024
    max_seq_len: int = 2048
    max_batch_size: int = 1
    max_beam_width: int = 1
    max_num_tokens: int = 8192
    plugin_config: PluginConfig = field(default_factory=PluginConfig)


@dataclass(frozen=True)
class Mapping(Slice):
    tp_size: int = 1
    pp_size: int = 1
    moe_ep_size: int = 1


@dataclass(frozen=True)
class QuantConfig(Slice):
    quant_algo: str = ""  # empty: not quantized


@dataclass(frozen=True)
class PretrainedConfig(Slice):
    architecture: str = ""
    dtype: str = ""
    vocab_size: int = 0  # 0: unknown
    mapping: Mapping = field(default_factory=Mapping)
    quantization: QuantConfig = field(default_factory=QuantConfig)


@dataclass(frozen=True)
class EngineConfig(Slice):
    """config.json of an engine's folder."""

    build_config: BuildConfig = field(default_factory=BuildConfig)
    pretrained_config: PretrainedConfig = field(default_factory=PretrainedConfig)

    @classmethod
    @about("engine_dir")
    def from_engine_dir(cls, engine_dir: str | Path) -> EngineConfig:
        """Read the configuration in an engine's folder. Raises ConfigError if the folder has no engine."""
        path = Path(engine_dir) / "config.json"
        if not path.is_file():
            raise ConfigError(f"--engine_dir {engine_dir}: no engine there: it has no config.json")
        return cls.from_file(path)
