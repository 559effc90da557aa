"""The parts that matter here of the configuration files that come with models and engines."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_type_hints

from disagg.errors import ConfigError, about
from mpillm import fields
from mpillm.configurator import Field
from mpillm.files import excerpt, read_json

T = TypeVar("T", bound="Slice")


@dataclass(frozen=True)
class Slice:
    """The part of a JSON object that matters here; other keys are ignored."""

    @classmethod
    def from_json(cls: type[T], data: Any, where: str) -> T:
        """Raise ConfigError, which begins with `where`, for a value of another type than the field's."""
        if not isinstance(data, dict):
            raise ConfigError(f"{where}: {excerpt(data)}; must be an object")
        values: dict[str, Any] = {}
        hints = get_type_hints(cls)
        for known in dataclasses.fields(cls):
            if data.get(known.name) is None or known.name.startswith("_"):
                continue
            kind, value, at = hints[known.name], data[known.name], f"{where}: {known.name}"
            if isinstance(kind, type) and issubclass(kind, Slice):
                values[known.name] = kind.from_json(value, at)
            elif kind == tuple[int, ...] and _is(value, int):
                values[known.name] = (value,)
            elif (
                kind == tuple[int, ...] and isinstance(value, list) and all(_is(item, int) for item in value)
            ):
                values[known.name] = tuple(value)
            elif _is(value, kind):
                values[known.name] = value
            else:
                raise ConfigError(f"{at}: {excerpt(value)}; must be {_KIND_NAMES[kind]}")
        return cls(**values)

    @classmethod
    def from_file(cls: type[T], path: str | Path) -> T:
        """Read a file; ConfigError names it if it cannot be read."""
        return cls.from_json(read_json(Path(path)), str(path))


_KIND_NAMES: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_KIND_NAMES[tuple[int, ...]] = "a whole number, or an array of them"


def _is(value: Any, kind: Any) -> bool:
    return type(value) is kind or (kind is float and type(value) is int)


@dataclass(frozen=True)
class GenerationConfig(Slice):
    """How a model's answers end and are sampled: the harness's JSON or Hugging Face's generation_config.json.

    The defaults are those of NVIDIA's harness (llmlib/config.py of its MLPerf Inference v5.1 submission). Its
    `bos_token_id` and `name`, which no backend there reads, are ignored.
    """

    eos_token_id: tuple[int, ...] = ()  # empty: the model's own
    max_output_len: int = 1024
    min_output_len: int = 1
    runtime_beam_width: int = 1
    streaming: bool = True
    temperature: float = 1.0
    top_k: int = 1
    top_p: float = 0.001
    use_stop_tokens: bool = False  # whether the data set's stop words end answers
    _unsaid: tuple[str, ...] = ()  # optional fields that a Hugging Face file leaves out: others may set them

    # Hugging Face's names of the same fields.
    _HUGGING_FACE: ClassVar[dict[str, str]] = {
        "max_new_tokens": "max_output_len",
        "min_new_tokens": "min_output_len",
        "num_beams": "runtime_beam_width",
    }

    @classmethod
    def from_json(cls, data: Any, where: str) -> GenerationConfig:
        """As `Slice.from_json`; the harness's files hold it under the key generation_config."""
        if isinstance(data, dict) and "generation_config" in data:
            data = data["generation_config"]
        elif isinstance(data, dict):
            data = {
                cls._HUGGING_FACE.get(key, key): value for key, value in data.items() if value is not None
            }
            if data.get("do_sample"):
                data = {"temperature": 1.0, "top_k": 50, "top_p": 1.0} | data  # transformers' defaults
            else:  # greedy, whatever these three are
                data |= {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
            unsaid = tuple(
                name for name in (*cls._HUGGING_FACE.values(), "use_stop_tokens") if name not in data
            )
            return dataclasses.replace(super().from_json(data, where), _unsaid=unsaid)
        return super().from_json(data, where)

    def values(self, where: str) -> dict[Field, Any]:
        """Return the values by field; ConfigError, which begins with `where`, if a field refuses one."""
        said: dict[str, tuple[Field, Any]] = {
            "max_output_len": (fields.max_output_len, self.max_output_len),
            "min_output_len": (fields.min_output_len, self.min_output_len),
            "runtime_beam_width": (fields.beam_width, self.runtime_beam_width),
            "temperature": (fields.temperature, self.temperature),
            "top_k": (fields.top_k, self.top_k),
            "top_p": (fields.top_p, self.top_p),
        }
        if self.eos_token_id:
            said["eos_token_id"] = (fields.end_ids, self.eos_token_id)
        if not self.use_stop_tokens:
            said["use_stop_tokens"] = (fields.stop_words, None)
        return {
            field: field.check(value, f"{where}: {name}")
            for name, (field, value) in said.items()
            if name not in self._unsaid
        }


# The parts of a TensorRT-LLM engine's config.json, with TensorRT-LLM's BuildConfig defaults as NVIDIA's
# harness has them.


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
    quant_algo: str = ""  # empty: none


@dataclass(frozen=True)
class PretrainedConfig(Slice):
    architecture: str = ""
    dtype: str = ""
    vocab_size: int = 0  # 0: not said
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
        """Read an engine's folder; ConfigError if there is no engine in it."""
        path = Path(engine_dir) / "config.json"
        if not path.is_file():
            raise ConfigError(f"--engine_dir {engine_dir}: no engine there: it has no config.json")
        return cls.from_file(path)
