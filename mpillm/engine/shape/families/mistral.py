"""Mistral (Jiang et al., 2023): Llama's layer, with attention limited to a sliding window."""

from __future__ import annotations

from typing import Any

from mpillm.engine.shape.config_fields import FamilyFields, Raw
from mpillm.engine.shape.families import llama
from mpillm.engine.shape.model_config import Family

# Mistral's defaults, which Mixtral shares.
DEFAULTS: dict[str, Any] = {"num_key_value_heads": 8, "max_position_embeddings": 131_072}


def every_layer(layer: int, raw: Raw) -> bool:
    return True


FIELDS = FamilyFields(defaults=DEFAULTS | {"sliding_window": 4096}, slides=every_layer)
MISTRAL = Family("MistralForCausalLM", "mistral", "Mistral", FIELDS, llama.layer)
