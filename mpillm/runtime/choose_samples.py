"""From options to the samples of a test: the workload's data set, the user's own, or a synthetic one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from disagg.errors import ConfigError
from mpillm.core_names import load_object
from mpillm.cores.base import LLMCore, ModelLimits
from mpillm.cores.registry import BackendRegistry
from mpillm.data.chat_request import REQUESTS, TOKENS_AS_CHAT
from mpillm.data.chat_template import Messages, Tools
from mpillm.data.conversation_dataset import (
    ConversationChoice,
    load_conversations,
    synthetic_conversations,
)
from mpillm.data.data_loader import LLMDataLoader
from mpillm.data.dataset import Dataset, PromptLimits, Synthetic, load_dataset
from mpillm.data.generated_history import GeneratedHistory, History, TokenHistory
from mpillm.data.preprocessed.loader import PreprocessedLoader, is_frame, loader_of
from mpillm.data.records import Columns
from mpillm.data.row_fields import FieldUse
from mpillm.data.row_files import is_row_file
from mpillm.data.synthetic_conversations import DEFAULT_CONVERSATIONS, SyntheticConversations
from mpillm.data.tiny_dataset import DATASET, write_dataset
from mpillm.data.tokenizer import ByteTokenizer, NoTokenizer, Tokenizer, load_tokenizer
from mpillm.engine.shape.find_model import model_folder
from mpillm.options.fields import BY_NAME
from mpillm.options.run_config import RunConfig
from mpillm.options.synthetic_conversations import sizes_of

# None: the prompts that come with mpillm
_Source: TypeAlias = "Path | Synthetic | SyntheticConversations | LLMDataLoader | None"


def load_samples(
    config: RunConfig, models: Sequence[ModelLimits | None], run_directory: Callable[[], Path]
) -> tuple[Dataset, Tokenizer]:
    """Return the data set and the tokenizer of a run.

    `models`: limits of each instance's model. Raises ConfigError if a sample exceeds one of them. For a
    scaled-down workload without --dataset_path, this writes a data set to `run_directory()`, and its path to
    `config`.
    """
    core_class = BackendRegistry.get(config.core_type)
    dataset, tokenizer = _load_samples(config, core_class, models, run_directory)
    if not core_class.lengths_each and _has_own_lengths(dataset, config):
        note = (
            f"its output lengths have no effect: --core_type {config.core_type} answers with up to"
            f" --max_output_len {config.max_output_len} tokens"
        )
        dataset = replace(dataset, note="; ".join(filter(None, [dataset.note, note])))
    return dataset, tokenizer


def _has_own_lengths(dataset: Dataset, config: RunConfig) -> bool:
    lengths = dataset.output_lengths
    return lengths is not None and bool(np.any(lengths < config.max_output_len))


def _load_samples(
    config: RunConfig,
    core_class: type[LLMCore],
    models: Sequence[ModelLimits | None],
    run_directory: Callable[[], Path],
) -> tuple[Dataset, Tokenizer]:
    tokenizer = tokenizer_of(config)
    limits = limits_of(config, [model for model in models if model is not None])
    if limits.vocab_size is not None and limits.end_ids and max(limits.end_ids) >= limits.vocab_size:
        ids, source = ",".join(map(str, limits.end_ids)), config.where("end_ids")
        raise ConfigError(
            f"--end_ids {ids} ({source}): {config.model_path or 'the core'} knows {limits.vocab_size} tokens"
        )
    chosen = _source(config, run_directory)
    columns = Columns(config.prompt_column, config.output_len_column)
    for name in ("prompt_column", "output_len_column"):
        if getattr(config, name) is not None and not isinstance(chosen, Path):
            raise ConfigError(
                f"{config.named(name)}: only for a --dataset_path with rows, such as JSONL or CSV",
                about=[name],
            )
    if config.endpoint_type in REQUESTS:
        return _chats(chosen, config, tokenizer, limits, columns), NoTokenizer("answers of chats are texts")
    has_tokens = isinstance(chosen, (Synthetic, SyntheticConversations)) or config.has_conversations
    if has_tokens or not core_class.takes_text or not isinstance(tokenizer, NoTokenizer):
        return _load(chosen, config, tokenizer, limits, columns), tokenizer
    assert not isinstance(chosen, SyntheticConversations)
    limits = _with_all_fields(replace(limits, max_seq_len=None))
    dataset = load_dataset(chosen, _TextsAsBytes(), limits, columns)
    return (_as_text(dataset, config, tokenizer) if dataset.texts else dataset), tokenizer


class _TextsAsBytes(ByteTokenizer):
    """Tokenizer of a data set whose texts go to the servers unchanged."""

    def encode_chats(self, chats: Sequence[Messages], tools: Tools = None) -> list[list[int]]:
        raise ConfigError(
            "messages: only a chat template makes a prompt of them; the server applies its own with"
            " --endpoint_type chat, and mpillm the one in the folder of the model's tokenizer (--model_path)"
        )


def _of_a_server(config: RunConfig, core_class: type[LLMCore]) -> Tokenizer:
    """Return the tokenizer of a server's model without a folder on this machine.

    For a preset of the embedded engine, served by Triton or by the run's own `mpillm serve`, it is the byte
    tokenizer. Other models have none.
    """
    if config.model_path and (config.server == "mpillm" or not core_class.takes_text):
        return ByteTokenizer()
    named = config.named("model_path") if config.model_path else "without --model_path"
    return NoTokenizer(f"--core_type {config.core_type}, {named}: no tokenizer")


def _load(
    chosen: _Source,
    config: RunConfig,
    tokenizer: Tokenizer,
    limits: PromptLimits,
    columns: Columns,
    writer: Tokenizer | None = None,
) -> Dataset:
    """Return a data set. `writer`: see `load_conversations`."""
    if isinstance(chosen, SyntheticConversations):
        return synthetic_conversations(chosen, tokenizer, limits, _are_generated(config))
    if not config.has_conversations:
        return load_dataset(chosen, tokenizer, limits, columns)
    assert isinstance(chosen, Path)  # `option_conflicts` refuses others
    choice = ConversationChoice(
        config.trace_columns, config.max_input_len, config.seed if config.shuffle else None
    )
    return load_conversations(chosen, tokenizer, limits, columns, _are_generated(config), choice, writer)


def _are_generated(config: RunConfig) -> bool | None:
    return None if config.history is None else config.history == "generated"


def _chats(
    chosen: _Source,
    config: RunConfig,
    tokenizer: Tokenizer,
    limits: PromptLimits,
    columns: Columns,
) -> Dataset:
    """Return a data set of requests with messages. Raises ConfigError if token ids are needed."""
    requests = REQUESTS[config.endpoint_type]
    _refuse_token_options(config, ", which a chat endpoint does not send")
    if isinstance(chosen, LLMDataLoader):
        raise ConfigError(f"{config.named('endpoint_type')}: {TOKENS_AS_CHAT}", about=["endpoint_type"])
    if isinstance(chosen, SyntheticConversations):
        dataset = synthetic_conversations(
            chosen, tokenizer, _of_chats(limits), _are_generated(config), requests=requests
        )
        return replace(dataset, sends_text=True)
    if isinstance(chosen, Synthetic):
        dataset = load_dataset(chosen, tokenizer, limits)
        texts = {i: tokenizer.decode(dataset.sample(i)) for i in range(len(dataset))}
        prompts = [np.array(prompt, np.int32) for prompt in requests.encode_batch([*texts.values()])]
        n_tokens = np.array([len(prompt) for prompt in prompts])
        return Dataset.packed(
            dataset.name,
            np.concatenate(prompts),
            n_tokens,
            output_lengths=dataset.output_lengths,
            texts=texts,
            sends_text=True,
        )
    chats = _load(chosen, config, requests, _of_chats(limits), columns, writer=tokenizer)
    return replace(chats, sends_text=True)


def _of_chats(limits: PromptLimits) -> PromptLimits:
    """Return the limits without those of tokens, which only the servers know."""
    return _with_all_fields(replace(limits, vocab_size=None, max_seq_len=None, max_prompt_len=None))


def _with_all_fields(limits: PromptLimits) -> PromptLimits:
    """Return the limits for servers that get bytes, with fields of a row beside its prompt."""
    is_used = limits.own_fields is not FieldUse.UNUSED
    return replace(limits, own_fields=FieldUse.ALL) if is_used else limits


def history_of(
    config: RunConfig, models: Sequence[ModelLimits | None], dataset: Dataset, tokenizer: Tokenizer
) -> History | None:
    """Return what makes the prompts of later turns; None if the data set has them.

    `models`, `dataset` and `tokenizer`: as for, and from, `load_samples`.
    """
    if dataset.turns is None or not dataset.turns.are_generated:
        return None
    conversations, limits = dataset.turns.conversations, limits_of(config, [one for one in models if one])
    if any(one.is_tokens for one in conversations if one.n_inherited + len(one.turns) > 1):
        return TokenHistory(conversations, limits)
    if (requests := REQUESTS.get(config.endpoint_type)) is not None:
        return GeneratedHistory(conversations, requests, _of_chats(limits))
    return GeneratedHistory(conversations, tokenizer, limits)


def _as_text(dataset: Dataset, config: RunConfig, tokenizer: NoTokenizer) -> Dataset:
    """Return a data set whose texts go to the servers unchanged. Raises ConfigError if tokens are needed."""
    if len(dataset.texts) < len(dataset):
        tokenizer.refuse()
    _refuse_token_options(config, ": name the folder of the model's tokenizer with --model_path")
    return replace(dataset, sends_text=True)


def _refuse_token_options(config: RunConfig, why: str) -> None:
    """Raise ConfigError if an option needs the tokens of answers."""
    tokens = {name: bool(config[BY_NAME[name]]) for name in ("save_outputs", "compliance_test", "audit_conf")}
    tokens["test_mode"] = config.test_mode == "AccuracyOnly"
    for name in (name for name, needed in tokens.items() if needed):
        raise ConfigError(
            f"{config.named(name)}: needs the tokens of answers{why}", about=[name, "model_path"]
        )


def tokenizer_of(config: RunConfig) -> Tokenizer:
    """Return the tokenizer of the run's model: the byte tokenizer for a preset, or a core without a model.

    If a server's model has no folder on this machine, see `_of_a_server`.

    Raises ConfigError if the user names a folder that is missing. A workload's own folder may be missing: the
    workload's data set has token ids.
    """
    try:
        folder = model_folder(config.model_path) if config.model_path else None
    except ConfigError as error:
        if config.is_user_set("model_path"):
            raise
        return NoTokenizer(str(error))
    core_class = BackendRegistry.get(config.core_type)
    if folder is None and core_class.is_client:
        return _of_a_server(config, core_class)
    return load_tokenizer(folder, config.apply_chat_template)


def check_tokenizer(config: RunConfig) -> None:
    """Raise ConfigError if a run would refuse the tokenizer: see `tokenizer_of`.

    Only the prompts that come with mpillm are known to be texts.
    """
    tokenizer = tokenizer_of(config)
    chosen = config.workload, config.dataset_path, config.synthetic_conversations, config.has_conversations
    are_texts = config.dataset == "prompts" and not any(chosen)
    need_tokens = not BackendRegistry.get(config.core_type).takes_text
    if are_texts and need_tokens and isinstance(tokenizer, NoTokenizer):
        tokenizer.refuse()


def limits_of(config: RunConfig, known: Sequence[ModelLimits]) -> PromptLimits:
    """Return the prompt limits that the options and the models of all instances set."""
    lengths = [section.max_seq_len for section in config.sections.values() or [config] if section.max_seq_len]
    return PromptLimits(
        min((model.vocab_size for model in known), default=None),
        min(lengths, default=None) or min((model.max_seq_len for model in known), default=None),
        config.max_output_len,
        min((model.max_prompt_len for model in known if model.max_prompt_len is not None), default=None),
        config.end_ids or (),
        tuple(tuple(word) for word in config.stop_words or () if not isinstance(word, str)),
        bool(config.stop_words) or not config.is_user_set("stop_words"),
        _own_fields(config),
    )


def _own_fields(config: RunConfig) -> FieldUse:
    """Return which fields of rows have an effect.

    A load client sends the same ones in all requests, and a workload of MLPerf prescribes them.
    """
    is_sent = config.workload is None and (config.harness is None or config.has_conversations)
    samples = BackendRegistry.get(config.core_type).samples_each
    return FieldUse.SAMPLING if is_sent and samples else FieldUse.UNUSED


def _source(config: RunConfig, run_directory: Callable[[], Path]) -> _Source:
    text_file = None if config.synthetic_text is None else Path(config.synthetic_text)
    if config.synthetic_conversations:
        return SyntheticConversations(
            sizes_of(config.synthetic_conversations),
            config.num_conversations or DEFAULT_CONVERSATIONS,
            config.seed,
            text_file,
        )
    if config.dataset == "synthetic":
        return Synthetic(
            config.input_mean,
            min(config.output_mean, config.max_output_len),
            config.input_stdev,
            config.output_stdev,
            config.num_samples,
            config.seed,
            text_file,
        )
    if ":" in config.dataset:
        return _loader_class(config.dataset).of(config)
    workload = config.workload
    if workload is not None and workload.scaled and not config.is_user_set("dataset_path"):
        dataset = run_directory() / DATASET
        write_dataset(workload, dataset)
        option = config.option_value("dataset_path")
        config.option_values["dataset_path"] = option._replace(value=str(dataset))
    if not config.dataset_path:
        return None
    path = Path(config.dataset_path)
    if config.has_conversations:
        return path
    is_workloads = workload is not None and (not is_row_file(path) or is_frame(path, workload))
    if is_workloads or PreprocessedLoader.reads(path):
        return loader_of(path, workload)
    return path


def _loader_class(path: str) -> type[LLMDataLoader]:
    """Return the class that ``package.module:Class`` names."""
    try:
        loader = load_object(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--dataset {path}: {error}", about=["dataset"]) from error
    if not (isinstance(loader, type) and issubclass(loader, LLMDataLoader)):
        raise ConfigError(f"--dataset {path}: not an LLMDataLoader", about=["dataset"])
    return loader
