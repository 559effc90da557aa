"""--speculative_config: names and meanings are those of TensorRT-LLM's `speculative_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from disagg.errors import ConfigError, about, nearest
from mpillm.engine.shape.engine_config import EngineConfig
from mpillm.engine.shape.read_config import load_model_config

NGRAM, DRAFT_TARGET, EAGLE, MTP = "NGram", "Draft_Target", "Eagle", "MTP"
_LENGTH, _MTP_LENGTH = "max_draft_len", "num_nextn_predict_layers"
_OF_TYPE = {
    NGRAM: (_LENGTH, "max_matching_ngram_size"),
    DRAFT_TARGET: (_LENGTH, "speculative_model"),
    EAGLE: (_LENGTH, "speculative_model"),
    MTP: (_MTP_LENGTH,),
}
_OPTION = "--speculative_config"


@dataclass(frozen=True)
class SpeculativeConfig:
    """How the engine proposes draft tokens."""

    decoding_type: str
    max_draft_len: int  # draft tokens of a sequence in a step; MTP calls it num_nextn_predict_layers
    max_matching_ngram_size: int = 2  # NGram: the most tokens whose earlier occurrence is searched
    # Draft_Target: a folder or preset, of the same vocabulary; Eagle: a head's folder
    speculative_model: str = ""
    max_concurrency: int | None = None  # no draft tokens while more sequences run

    @classmethod
    @about("speculative_config")
    def read(cls, raw: Mapping[str, Any]) -> SpeculativeConfig:
        """Return the configuration from an option or a YAML. Raises ConfigError for a wrong name or value."""
        values = {str(name): value for name, value in raw.items()}  # names in a YAML may be numbers
        kind = str(values.get("decoding_type"))
        if kind not in _OF_TYPE:
            raise ConfigError(
                f"{_OPTION} decoding_type {kind}: the torch core has {', '.join(_OF_TYPE)}"
                f"{nearest(kind, _OF_TYPE)}"
            )
        if kind == MTP and _MTP_LENGTH not in values and _LENGTH in values:
            values[_MTP_LENGTH] = values.pop(_LENGTH)  # its name in recipes for TensorRT-LLM 1.3
        length, *more = _OF_TYPE[kind]
        known = ("decoding_type", length, "max_concurrency", *more)
        for name, value in values.items():
            if name not in known:
                raise ConfigError(
                    f"{_OPTION} {name}: decoding_type {kind} of the torch core has {', '.join(known)}"
                    f"{nearest(name, known)}"
                )
            is_text = name in ("decoding_type", "speculative_model")
            if not (isinstance(value, str) and value if is_text else type(value) is int and value > 0):
                expected = "a path" if is_text else "a whole number of at least 1"
                raise ConfigError(f"{_OPTION} {name} {value}: must be {expected}")
        for name in (_LENGTH, _MTP_LENGTH, "speculative_model"):
            if name in known and name not in values:
                raise ConfigError(f"{_OPTION}: decoding_type {kind} needs {name}")
        return cls(**{_LENGTH if name == length else name: value for name, value in values.items()})


def read_speculation(config: EngineConfig) -> SpeculativeConfig | None:
    """Return how an instance drafts; None if it does not: a context instance computes only first tokens."""
    if not config.speculative_config or config.role == "context":
        return None
    return SpeculativeConfig.read(config.speculative_config)


def decode_rows(config: EngineConfig) -> int:
    """Return the rows of the largest step without contexts: last tokens and any draft tokens."""
    n_sequences = config.scheduler.max_batch_size
    if (how := read_speculation(config)) is None:
        return n_sequences
    n_drafting = min(n_sequences, how.max_concurrency or n_sequences)
    return max(n_sequences, min(n_drafting * (1 + how.max_draft_len), config.scheduler.max_num_tokens))


def max_rows(config: EngineConfig) -> int:
    """Return the rows of the largest step."""
    return max(config.scheduler.max_num_tokens, decode_rows(config))


def draft_config(config: EngineConfig) -> EngineConfig | None:
    """Return the configuration of the draft model, which is on one rank; None if the instance needs none.

    It names each value that the target model shares with it. Other options are the target's own.
    """
    how = read_speculation(config)
    if how is None or how.decoding_type != DRAFT_TARGET:
        return None
    longest = config.max_seq_len
    if longest is not None:
        longest = min(longest, load_model_config(how.speculative_model).max_position_embeddings)
    return EngineConfig(
        scheduler=config.scheduler,
        model_path=how.speculative_model,
        load_format=config.load_format,
        dtype=config.dtype,
        max_seq_len=longest,
        kv_cache_tokens=config.kv_cache_tokens,
        kv_cache_free_gpu_mem_fraction=config.kv_cache_free_gpu_mem_fraction,
        end_ids=(),
        instance=config.instance,
        gpu=config.gpu,
        gpu_bytes=config.gpu_bytes,
        n_threads=config.n_threads,
        node_ranks=max(1, config.node_ranks // (config.tp_size * config.pp_size)),  # one per instance
    )
