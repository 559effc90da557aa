"""A model's generation config, as a layer of the options."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from mpillm.json_slice import Slice
from mpillm.options.field import Field
from mpillm.options.fields import AllFields


@dataclass(frozen=True)
class GenerationConfig(Slice):
    """How a model's answers end and are sampled: NVIDIA's JSON or Hugging Face's generation_config.json.

    The defaults are those of NVIDIA's harness (llmlib/config.py of its MLPerf Inference v5.1 submission). Its
    fields `bos_token_id` and `name` are ignored, because no backend of the harness reads them.
    """

    eos_token_id: tuple[int, ...] = ()  # empty: the model's end tokens
    max_output_len: int = 1024
    min_output_len: int = 1
    runtime_beam_width: int = 1
    streaming: bool = True
    temperature: float = 1.0
    top_k: int = 1
    top_p: float = 0.001
    use_stop_tokens: bool = False  # whether the data set's stop words end answers
    _missing: tuple[str, ...] = ()  # fields that a Hugging Face file leaves out: other sources may set them

    # Hugging Face's names of the same fields.
    _HUGGING_FACE: ClassVar[dict[str, str]] = {
        "max_new_tokens": "max_output_len",
        "min_new_tokens": "min_output_len",
        "num_beams": "runtime_beam_width",
    }

    @classmethod
    def from_json(cls, data: Any, where: str) -> GenerationConfig:
        """Do as `Slice.from_json`; the harness's files have the values under the key generation_config."""
        if isinstance(data, dict) and "generation_config" in data:
            data = data["generation_config"]
        elif isinstance(data, dict):
            data = {
                cls._HUGGING_FACE.get(key, key): value for key, value in data.items() if value is not None
            }
            if data.get("do_sample"):
                data = {"temperature": 1.0, "top_k": 50, "top_p": 1.0} | data  # transformers' defaults
            else:  # greedy, whatever the file has for these three
                data |= {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
            missing = tuple(
                name for name in (*cls._HUGGING_FACE.values(), "use_stop_tokens") if name not in data
            )
            return dataclasses.replace(super().from_json(data, where), _missing=missing)
        return super().from_json(data, where)

    def values(self, where: str) -> dict[Field, Any]:
        """Return the values by field. Raises ConfigError, which begins with `where`, for an invalid value."""
        fields: dict[str, tuple[Field, Any]] = {
            "max_output_len": (AllFields.max_output_len, self.max_output_len),
            "min_output_len": (AllFields.min_output_len, self.min_output_len),
            "runtime_beam_width": (AllFields.beam_width, self.runtime_beam_width),
            "temperature": (AllFields.temperature, self.temperature),
            "top_k": (AllFields.top_k, self.top_k),
            "top_p": (AllFields.top_p, self.top_p),
        }
        if self.eos_token_id:
            fields["eos_token_id"] = (AllFields.end_ids, self.eos_token_id)
        if not self.use_stop_tokens:
            fields["use_stop_tokens"] = (AllFields.stop_words, None)
        return {
            field: field.check(value, f"{where}: {name}")
            for name, (field, value) in fields.items()
            if name not in self._missing
        }
