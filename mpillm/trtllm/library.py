"""Common parts of the cores for TensorRT-LLM's two interfaces: the package, model limits, response rows.

Paths in comments are in TensorRT-LLM's repository. Importing the package is collective over MPI.COMM_WORLD,
because tensorrt_llm/_utils.py splits that communicator by host (`Split_type`), and tensorrt_llm/_common.py
splits it again in C++ (`MpiComm.local_init`). So every rank of a run imports it, also without an instance
(`LLMCore.world_import`).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from disagg.errors import ConfigError, about
from mpillm.comms.messages import NO_INSTANCE, RESPONSE, Batch, RequestFlag, ResponseFlag
from mpillm.cores.base import CoreConfig, NumericLimits
from mpillm.data.model_files import EngineConfig
from mpillm.errors import ExitCode, Failure, RunError
from mpillm.files import read_object
from mpillm.json_slice import Slice
from mpillm.options.fields.runtime_flags import RUNTIME_FLAGS, RUNTIME_OPTIONS
from mpillm.options.generation_config import GenerationConfig
from mpillm.trtllm import installed

PACKAGE = "tensorrt_llm"
EXTRA = "trtllm"
NO_END = -1  # an end_id without a token: only the length ends the answer
UNLIMITED_TOKENS = 1 << 40  # requests wait for the KV cache inside the library
_ANY_TOKEN = 1 << 31
_OWN_FLAGS = ("trtllm_backend", *RUNTIME_FLAGS, *RUNTIME_OPTIONS)


def check_library(config: CoreConfig) -> None:
    """Raise ConfigError if the package is not installed, or an option is not supported. Imports nothing."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            f"--core_type {config.core_type} needs the package '{PACKAGE}': pip install 'mpillm[{EXTRA}]',"
            " or run in one of NVIDIA's containers of TensorRT-LLM",
            about=["core_type"],
        )
    if config.role != "executor":
        raise ConfigError(
            f"--core_type {config.core_type} hands over no KV cache: disaggregated runs with TensorRT-LLM are"
            " --core_type trtllm_disagg",
            about=["core_type", "mode"],
        )
    if config.engine.beam_width != 1:
        raise ConfigError(
            f"--beam_width {config.engine.beam_width}: the {config.core_type} core answers with one beam",
            about=["beam_width"],
        )
    if texts := [word for word in config.engine.stop_words if isinstance(word, str)]:
        raise ConfigError(
            f"--stop_words {texts[0]!r}: the {config.core_type} core passes tokens on, not text; give it as"
            " an array of token ids",
            about=["stop_words"],
        )


def no_engines(config: CoreConfig) -> ConfigError:
    """Return the error for an imported release that has only the PyTorch backend."""
    version = getattr(sys.modules.get(PACKAGE), "__version__", "of this release")
    return installed.no_engines(f"--core_type {config.core_type}", version)


def engine_limits(config: CoreConfig, engine: EngineConfig) -> NumericLimits:
    """Return the limits of an engine. Without chunked context, a prompt must fit into one step.

    Raises ConfigError if the installed release runs no engines.
    """
    installed.check_engines(f"--core_type {config.core_type}")
    build, scheduler = engine.build_config, config.engine.scheduler
    max_prompt_len = (
        None if scheduler.enable_chunked_context else min(scheduler.max_num_tokens, build.max_num_tokens)
    )
    return NumericLimits(
        engine.pretrained_config.vocab_size or _ANY_TOKEN,
        min(config.engine.max_seq_len or build.max_seq_len, build.max_seq_len),
        max_prompt_len,
    )


@dataclass(frozen=True)
class _ConfigJson(Slice):
    """Limits in Hugging Face's config.json."""

    vocab_size: int = _ANY_TOKEN
    max_position_embeddings: int = _ANY_TOKEN


@about("core_type", "model_path")
def folder_limits(config: CoreConfig) -> NumericLimits:
    """Return the limits of the model in a Hugging Face folder. Raises ConfigError without a folder."""
    path = Path(config.engine.model_path or "")
    if not config.engine.model_path or not (path / "config.json").is_file():
        which = f", which {path} is not" if config.engine.model_path else ""
        raise ConfigError(f"--core_type {config.core_type} needs --model_path: a Hugging Face folder{which}")
    raw = read_object(path / "config.json")
    text = _ConfigJson.from_json(raw.get("text_config", raw), str(path / "config.json"))
    if min(text.vocab_size, text.max_position_embeddings) < 1:
        raise ConfigError(f"{path / 'config.json'}: vocab_size or max_position_embeddings is below 1")
    scheduler = config.engine.scheduler
    return NumericLimits(
        min(text.vocab_size, _ANY_TOKEN),
        config.engine.max_seq_len or min(text.max_position_embeddings, _ANY_TOKEN),
        None if scheduler.enable_chunked_context else scheduler.max_num_tokens,
    )


def end_ids(config: CoreConfig) -> tuple[int, ...]:
    """Return the end tokens from the options, or else from the model's folder.

    An engine does not contain end tokens. Raises ConfigError if no option or file has them.
    """
    if config.engine.end_ids is not None:
        return config.engine.end_ids
    for name in ("generation_config.json", "config.json"):
        path = Path(config.engine.model_path or "") / name
        if not config.engine.model_path or not path.is_file():
            continue
        if ids := GenerationConfig.from_file(path).eos_token_id:
            return ids
    raise ConfigError(
        f"--core_type {config.core_type}: nothing says which tokens end an answer; give --end_ids,"
        " --llm_gen_config_path, or a --model_path with a generation_config.json",
        about=["core_type", "end_ids", "llm_gen_config_path", "model_path"],
    )


def sampling(row: np.void) -> dict[str, Any]:
    """Return the sampling parameters of a REQUEST row, by names common to both interfaces.

    Greedy is top_k 1. Parameters without effect are omitted.
    """
    chosen: dict[str, Any] = {"top_k": 1}
    if row["temperature"] > 0:
        chosen = {"temperature": float(row["temperature"]), "seed": int(row["seed"])}
        if row["top_k"]:
            chosen["top_k"] = int(row["top_k"])
        if row["top_p"] < 1:
            chosen["top_p"] = float(row["top_p"])
    if row["min_output"] > 1:
        chosen["min_tokens"] = int(row["min_output"])
    return chosen


def ends_of(row: np.void, ends: tuple[int, ...]) -> tuple[int, ...]:
    """Return the end tokens of an answer; NO_END if it has none."""
    return (NO_END,) if row["flags"] & RequestFlag.IGNORE_END or not ends else ends


def stops(config: CoreConfig, row: np.void, ends: tuple[int, ...]) -> list[list[int]]:
    """Return the tokens of an answer's stop words, and its end tokens after the first."""
    stop_words = () if row["flags"] & RequestFlag.IGNORE_STOP else config.engine.stop_words
    return [
        *([end] for end in ends_of(row, ends)[1:]),
        *(list(word) for word in stop_words if not isinstance(word, str)),
    ]


def others(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the runtime flags that mpillm forwards to TensorRT-LLM unchanged."""
    return {name: value for name, value in flags.items() if name not in _OWN_FLAGS and value is not None}


def streams(row: np.void, first_token_times: bool) -> bool:
    """Return whether a request streams its tokens. Raises RuntimeError for a request with a handoff."""
    if row["generation"] != NO_INSTANCE:
        raise RuntimeError("TensorRT-LLM's cores do not support a handoff")
    return first_token_times or bool(row["flags"] & RequestFlag.STREAM)


@dataclass(slots=True)
class _Open:
    """A request in the library."""

    stream: bool
    cancelled: bool = False
    n_sent: int = 0  # tokens sent to the leader
    answer: list[int] = field(default_factory=list)


class LibraryRequests:
    """Open requests, and rows for their responses. Not thread-safe."""

    def __init__(self, rank: int) -> None:
        """`rank`: world rank, for messages."""
        self._rank = rank
        self._open: dict[int, _Open] = {}
        self._rows: list[tuple[int, int, int]] = []
        self._tokens: list[int] = []
        self.ended = 0  # number of requests

    def __len__(self) -> int:
        """Return the number of open requests."""
        return len(self._open)

    def begin(self, requests: Batch) -> None:
        for id_, flags in zip(requests.rows["id"].tolist(), requests.rows["flags"].tolist(), strict=True):
            self._open[id_] = _Open(bool(flags & RequestFlag.STREAM))

    def cancel(self, ids: Iterable[int]) -> list[int]:
        """Mark the open requests in `ids` and return them. Their last answer becomes a CANCELLED row."""
        open_ids = [id_ for id_ in ids if id_ in self._open]
        for id_ in open_ids:
            self._open[id_].cancelled = True
        return open_ids

    def add(self, id_: int, new: list[int], is_final: bool) -> None:
        """Add the next tokens of an answer. Raises RunError if the answer ends without tokens."""
        request = self._open[id_]
        request.answer += new
        answer, n_sent = request.answer, request.n_sent
        if is_final:
            del self._open[id_]
            self.ended += 1
            if request.cancelled:
                self._row(id_, ResponseFlag.FINAL | ResponseFlag.CANCELLED, [])
            elif answer:
                self._row(id_, ResponseFlag.FINAL | (0 if n_sent else ResponseFlag.FIRST), answer)
            else:
                raise self.failed(id_, "an answer without tokens")
        elif not request.cancelled and answer and not n_sent:
            request.n_sent = 1
            self._row(id_, ResponseFlag.FIRST, answer[:1])
        elif not request.cancelled and request.stream and len(answer) > n_sent:
            request.n_sent = len(answer)
            self._row(id_, ResponseFlag.PARTIAL, answer[n_sent:])

    def failed(self, id_: int, cause: object) -> RunError:
        """Return the error that ends the run after TensorRT-LLM failed on a request."""
        return RunError(
            Failure(f"TensorRT-LLM, request {id_}: {cause}", self._rank, code=ExitCode.TEST_FAILED)
        )

    def take(self) -> Batch | None:
        """Return the RESPONSE rows since the last call."""
        if not self._rows:
            return None
        batch = Batch(np.array(self._rows, RESPONSE), np.array(self._tokens, np.int32))
        self._rows, self._tokens = [], []
        return batch

    def _row(self, id_: int, flags: int, tokens: list[int]) -> None:
        self._rows.append((id_, len(tokens), int(flags)))
        self._tokens += tokens
