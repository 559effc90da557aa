"""What the cores of TensorRT-LLM's two interfaces share: the package, a model's limits, answers as rows.

Statements about the library cite its repository by path. Importing it is collective over MPI.COMM_WORLD,
because tensorrt_llm/_utils.py splits that communicator by host (`Split_type`), and tensorrt_llm/_common.py
does so again in C++ (`MpiComm.local_init`). So every rank of a run imports it, even without an instance: see
`LLMCore.world_import`.
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
from mpillm.cores.base import CoreConfig, StatedLimits
from mpillm.data.model_files import EngineConfig
from mpillm.errors import ExitCode, Failure, RunError
from mpillm.files import read_object
from mpillm.json_slice import Slice
from mpillm.options.fields.runtime_flags import RUNTIME_FLAGS, RUNTIME_OPTIONS
from mpillm.options.generation_config import GenerationConfig

PACKAGE = "tensorrt_llm"
EXTRA = "trtllm"
NO_END = -1  # an end_id that no token has: only the length ends the answer
UNLIMITED_TOKENS = 1 << 40  # requests wait for the KV cache inside the library
_ANY_TOKEN = 1 << 31
_OURS = ("trtllm_backend", *RUNTIME_FLAGS, *RUNTIME_OPTIONS)


def check_library(config: CoreConfig) -> None:
    """Check that the package is installed, without importing it, and what neither core does.

    Raises ConfigError.
    """
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
    """Make the error of a release that has only the PyTorch backend."""
    version = getattr(sys.modules.get(PACKAGE), "__version__", "of this release")
    return ConfigError(
        f"--core_type {config.core_type}: TensorRT-LLM {version} runs no engines, of which 1.3.0rc20 was the"
        " last release; use --core_type trtllm_hlapi with a Hugging Face folder",
        about=["core_type", "trtllm_runtime_flags"],
    )


def engine_limits(config: CoreConfig, engine: EngineConfig) -> StatedLimits:
    """Return the limits of an engine; without chunked context a prompt must fit into one step."""
    build, scheduler = engine.build_config, config.engine.scheduler
    longest = (
        None if scheduler.enable_chunked_context else min(scheduler.max_num_tokens, build.max_num_tokens)
    )
    return StatedLimits(
        engine.pretrained_config.vocab_size or _ANY_TOKEN,
        min(config.engine.max_seq_len or build.max_seq_len, build.max_seq_len),
        longest,
    )


@dataclass(frozen=True)
class _ModelLimits(Slice):
    """Hugging Face's names of them."""

    vocab_size: int = _ANY_TOKEN
    max_position_embeddings: int = _ANY_TOKEN


@about("core_type", "model_path")
def folder_limits(config: CoreConfig) -> StatedLimits:
    """Return the limits of the model in a Hugging Face folder.

    Raises ConfigError if `config` names no folder.
    """
    path = Path(config.engine.model_path or "")
    if not config.engine.model_path or not (path / "config.json").is_file():
        which = f", which {path} is not" if config.engine.model_path else ""
        raise ConfigError(f"--core_type {config.core_type} needs --model_path: a Hugging Face folder{which}")
    raw = read_object(path / "config.json")
    text = _ModelLimits.from_json(raw.get("text_config", raw), str(path / "config.json"))
    if min(text.vocab_size, text.max_position_embeddings) < 1:
        raise ConfigError(f"{path / 'config.json'}: vocab_size or max_position_embeddings is below 1")
    scheduler = config.engine.scheduler
    return StatedLimits(
        min(text.vocab_size, _ANY_TOKEN),
        config.engine.max_seq_len or min(text.max_position_embeddings, _ANY_TOKEN),
        None if scheduler.enable_chunked_context else scheduler.max_num_tokens,
    )


def end_ids(config: CoreConfig) -> tuple[int, ...]:
    """Return the tokens that end an answer: those of the options, else those of the model's folder.

    An engine has none of its own. Raises ConfigError if no option or file names them.
    """
    if config.engine.end_ids is not None:
        return config.engine.end_ids
    for name in ("generation_config.json", "config.json"):
        path = Path(config.engine.model_path or "") / name
        if not config.engine.model_path or not path.is_file():
            continue
        if found := GenerationConfig.from_file(path).eos_token_id:
            return found
    raise ConfigError(
        f"--core_type {config.core_type}: nothing says which tokens end an answer; give --end_ids,"
        " --llm_gen_config_path, or a --model_path with a generation_config.json",
        about=["core_type", "end_ids", "llm_gen_config_path", "model_path"],
    )


def sampling(row: np.void) -> dict[str, Any]:
    """Return how a REQUEST row is sampled, by names that both have.

    Greedy is top_k 1; what is off is left out.
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
    """Return those of the model's end tokens that end this answer: at least one, NO_END if none does."""
    return (NO_END,) if row["flags"] & RequestFlag.IGNORE_END or not ends else ends


def stops(config: CoreConfig, row: np.void, ends: tuple[int, ...]) -> list[list[int]]:
    """Return what ends an answer, beside its first end token: other end tokens and stop words, as tokens."""
    words = () if row["flags"] & RequestFlag.IGNORE_STOP else config.engine.stop_words
    return [
        *([end] for end in ends_of(row, ends)[1:]),
        *(list(word) for word in words if not isinstance(word, str)),
    ]


def others(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the runtime flags that only TensorRT-LLM knows, which are passed on as given."""
    return {name: value for name, value in flags.items() if name not in _OURS and value is not None}


def streams(row: np.void, first_token_times: bool) -> bool:
    """Return whether to ask for tokens as they come. Raises RuntimeError for a request to hand over."""
    if row["generation"] != NO_INSTANCE:
        raise RuntimeError("TensorRT-LLM's cores hand over no KV cache")
    return first_token_times or bool(row["flags"] & RequestFlag.STREAM)


@dataclass(slots=True)
class _Open:
    """A request that the library is working on."""

    stream: bool  # its tokens are wanted as they come
    cancelled: bool = False
    passed_on: int = 0  # tokens
    answer: list[int] = field(default_factory=list)


class Answers:
    """The open requests, and rows for what the library has answered. For one thread."""

    def __init__(self, rank: int) -> None:
        """`rank`: in the world, for messages."""
        self._rank = rank
        self._open: dict[int, _Open] = {}
        self._rows: list[tuple[int, int, int]] = []
        self._tokens: list[int] = []
        self.ended = 0  # requests

    def __len__(self) -> int:
        """Return the number of open requests."""
        return len(self._open)

    def begin(self, requests: Batch) -> None:
        for id_, flags in zip(requests.rows["id"].tolist(), requests.rows["flags"].tolist(), strict=True):
            self._open[id_] = _Open(bool(flags & RequestFlag.STREAM))

    def cancel(self, ids: Iterable[int]) -> list[int]:
        """Return those of `ids` that are open. The last answer to each becomes its CANCELLED row."""
        mine = [id_ for id_ in ids if id_ in self._open]
        for id_ in mine:
            self._open[id_].cancelled = True
        return mine

    def add(self, id_: int, new: list[int], is_final: bool) -> None:
        """Take the next tokens of an answer. Raises RunError if the answer ends without any."""
        request = self._open[id_]
        request.answer += new
        answer, passed_on = request.answer, request.passed_on
        if is_final:
            del self._open[id_]
            self.ended += 1
            if request.cancelled:
                self._row(id_, ResponseFlag.FINAL | ResponseFlag.CANCELLED, [])
            elif answer:
                self._row(id_, ResponseFlag.FINAL | (0 if passed_on else ResponseFlag.FIRST), answer)
            else:
                raise self.failed(id_, "an answer without tokens")
        elif not request.cancelled and answer and not passed_on:
            request.passed_on = 1
            self._row(id_, ResponseFlag.FIRST, answer[:1])
        elif not request.cancelled and request.stream and len(answer) > passed_on:
            request.passed_on = len(answer)
            self._row(id_, ResponseFlag.PARTIAL, answer[passed_on:])

    def failed(self, id_: int, cause: object) -> RunError:
        """Make the error that ends the run: TensorRT-LLM could not answer a request."""
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
