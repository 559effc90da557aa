"""Every option of `run`: one registry from which the command line, --help and the run's config.json are made."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from disagg.errors import ConfigError, nearest


def flag_dict(text: str) -> dict[str, Any]:
    """``key1:value1,key2:value2`` with values read as bool, int, float or else text; ValueError at the first bad pair."""
    result: dict[str, Any] = {}
    for pair in filter(None, text.split(",")):
        key, colon, value = pair.partition(":")
        if not colon or not key.strip():
            raise ValueError(f"'{pair}' is not key:value")
        result[key.strip()] = _literal(value.strip())
    return result


def _literal(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def boolean(text: str) -> bool:
    """true or false, as words or digits."""
    value = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(text.lower())
    if value is None:
        raise ValueError("not true or false")
    return value


def positive(text: str) -> int:
    """An int of at least 1."""
    return _at_least(int(text), 1)


def natural(text: str) -> int:
    """An int of at least 0."""
    return _at_least(int(text), 0)


def integers(text: str) -> tuple[int, ...]:
    """Ints of at least 1, with commas between them."""
    return tuple(map(positive, text.split(",")))


def seconds(text: str) -> float:
    """A duration above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError("not a number of seconds above 0")
    return value


def not_negative(text: str) -> float:
    """A number of at least 0."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError("not a number of at least 0")
    return value


def fraction(text: str) -> float:
    """A number above 0 and up to 1."""
    value = float(text)
    if not 0 < value <= 1:
        raise ValueError("not above 0 and up to 1")
    return value


def stop_words(text: str) -> list[str | list[int]]:
    """One word, or a JSON array of words and of arrays of token ids."""
    words = json.loads(text) if text.startswith("[") else [text]
    if not all(word and (isinstance(word, str) or (isinstance(word, list) and all(type(t) is int for t in word))) for word in words):
        raise ValueError("neither text nor an array of token ids")
    return list(words)


def _at_least(value: int, least: int) -> int:
    if value < least:
        raise ValueError(f"less than {least}")
    return value


@dataclass(frozen=True)
class Field:
    """One option. Its name is with underscores; hyphens mean the same on the command line."""

    name: str
    description: str
    from_string: Callable[[str], Any] = str
    default: Any = None
    choices: tuple[str, ...] = ()
    group: str = "run"

    def parse(self, text: str, source: str) -> Any:
        """The value of `text`; ConfigError naming `source`, the text, and what is allowed."""
        if self.choices and text not in self.choices:
            by_case = {choice.lower(): choice for choice in self.choices}
            if text.lower() in by_case:
                return by_case[text.lower()]
            raise ConfigError(f"{source} {text}: not one of {', '.join(self.choices)}{nearest(text, self.choices)}")
        try:
            return self.from_string(text)
        except ValueError as error:
            why = f" ({error})" if self.from_string is flag_dict else ""
            raise ConfigError(f"{source} {text}: expected {_KINDS[self.from_string]}{why}") from None


# What each kind of text must be, as an error says it.
_KINDS: dict[Callable[[str], Any], str] = {
    flag_dict: "key:value,key:value",
    boolean: "true or false",
    positive: "a whole number of at least 1",
    integers: "whole numbers of at least 1, with commas between them",
    natural: "a whole number of at least 0",
    seconds: "a number of seconds above 0",
    not_negative: "a number of at least 0",
    fraction: "a number above 0 and up to 1",
    stop_words: 'a word, or a JSON array of words and arrays of token ids, as ["###", [13, 13]]',
}

DEADLINES = {"join": 60, "load": 1800, "health": 120, "warmup": 300, "ready": 60, "test": 21600, "drain": 300, "stop": 60}

FIELDS = (
    # what runs where
    Field(
        "mode",
        "one kind of instance, or context and generation apart",
        default="aggregated",
        choices=("aggregated", "disaggregated"),
        group="topology",
    ),
    Field("core_type", "the backend, by name or as module:Class", default="torch", group="topology"),
    Field("core_options", "options of the core, as key:value,key:value", flag_dict, {}, group="topology"),
    Field("disagg_config", "the disaggregation YAML; made from the options below and the number of ranks if not given", group="topology"),
    Field("num_ctx_servers", "context instances", positive, group="topology"),
    Field("ctx_tp_size", "tensor parallel size of a context instance", positive, group="topology"),
    Field("ctx_pp_size", "pipeline parallel size of a context instance", positive, group="topology"),
    Field("num_gen_servers", "generation instances", positive, group="topology"),
    Field("gen_tp_size", "tensor parallel size of a generation instance", positive, group="topology"),
    Field("gen_pp_size", "pipeline parallel size of a generation instance", positive, group="topology"),
    Field("tensor_parallelism", "tensor parallel size of an executor", positive, group="topology"),
    Field("pipeline_parallelism", "pipeline parallel size of an executor", positive, group="topology"),
    Field("moe_expert_parallelism", "ranks of a TP group over which experts are spread", positive, group="topology"),
    Field(
        "traffic_distribution_policy",
        "which instance gets a request",
        default="load_balancing",
        choices=("load_balancing", "round_robin"),
        group="topology",
    ),
    # the model
    Field(
        "model_path",
        "a Hugging Face folder, or a preset with random weights: llama2-7b, llama2-13b, llama2-70b, llama3.1-8b, llama3.1-405b,"
        " llama3.2-1b, mixtral-8x7b, tiny-llama, tiny-mixtral",
        group="model",
    ),
    Field(
        "load_format", "read the weights, or make random ones from config.json", default="auto", choices=("auto", "dummy"), group="model"
    ),
    Field(
        "dtype", "of weights and KV cache; auto is the checkpoint's", default="auto", choices=("auto", "float32", "bfloat16"), group="model"
    ),
    Field(
        "device",
        "what the engine runs on; auto: GPUs, one for each worker rank, where there are any",
        default="auto",
        choices=("auto", "cuda", "cpu"),
        group="model",
    ),
    Field("max_batch_size", "requests that an instance runs at once [default: the core's]", positive, group="model"),
    Field("max_num_tokens", "tokens of one engine step [default: the core's]", positive, group="model"),
    Field("max_seq_len", "prompt and answer together [default: the model's]", positive, group="model"),
    Field("kv_cache_tokens", "size of a rank's KV cache [default: the core's]", positive, group="model"),
    Field(
        "kv_cache_free_gpu_mem_fraction",
        "without kv_cache_tokens: the part of a GPU's memory, of what the model leaves, that the KV cache takes",
        fraction,
        0.9,
        group="model",
    ),
    Field("tokens_per_block", "tokens of one KV cache block", positive, 32, group="model"),
    Field("enable_chunked_context", "let a prompt be computed in several steps", boolean, True, group="model"),
    Field(
        "context_chunking_policy",
        "whose prompt is computed in a step: the oldest's as far as it goes, or a like piece of each",
        default="first_come_first_served",
        choices=("first_come_first_served", "equal_progress"),
        group="model",
    ),
    Field(
        "batch_scheduler_policy",
        "when a request starts: as soon as its prompt fits the KV cache (one that finds it full later is evicted and computed again), when "
        "its longest answer fits, or in batches that run to their end",
        default="max_util",
        choices=("max_util", "no_evict", "static"),
        group="model",
    ),
    Field(
        "enable_kv_cache_reuse",
        "compute a beginning that prompts have in common once; MLPerf forbids it; generation instances do not look handed-over prompts up",
        boolean,
        False,
        group="model",
    ),
    Field("num_threads", "CPU threads of each instance rank [default: the node's cores, shared evenly]", positive, group="model"),
    # the data
    Field(
        "dataset_path",
        'JSONL with {"prompt": …} or {"input_tokens": […]} per line [default: the prompts that come with mpillm]',
        group="data",
    ),
    Field(
        "dataset",
        "the prompts of dataset_path, or random tokens by length",
        default="prompts",
        choices=("prompts", "synthetic"),
        group="data",
    ),
    Field("num_samples", "size of the synthetic data set", positive, 1024, group="data"),
    Field("input_mean", "synthetic: mean prompt length, tokens", not_negative, 128.0, group="data"),
    Field("input_stdev", "synthetic: its standard deviation", not_negative, 0.0, group="data"),
    Field("output_mean", "synthetic: mean answer length, tokens", not_negative, 32.0, group="data"),
    Field("output_stdev", "synthetic: its standard deviation", not_negative, 0.0, group="data"),
    Field("apply_chat_template", "put prompts into the model's chat template, if it has one", boolean, True, group="data"),
    # generation
    Field("max_output_len", "most tokens of an answer, the end token included", positive, 128, group="generation"),
    Field("min_output_len", "no end token or stop word ends an answer before this many tokens", natural, 0, group="generation"),
    Field(
        "stop_words",
        'an answer ends behind any of these: one word, or a JSON array of words and of token ids, as ["###", [13, 13]]',
        stop_words,
        group="generation",
    ),
    Field("beam_width", "beams of a search; the torch core has 1 alone", positive, 1, group="generation"),
    Field("temperature", "0 is greedy", not_negative, 0.0, group="generation"),
    Field("top_k", "sample among the k likeliest tokens; 0 is all", natural, 0, group="generation"),
    Field("top_p", "sample among the likeliest tokens that hold this probability", fraction, 1.0, group="generation"),
    Field("seed", "of sampling and synthetic data", natural, 0, group="generation"),
    # the test
    Field("scenarios", "LoadGen's scenario", default="Offline", choices=("Offline", "Server", "SingleStream"), group="test"),
    Field("test_mode", "LoadGen's mode", default="PerformanceOnly", choices=("PerformanceOnly", "AccuracyOnly"), group="test"),
    Field("user_conf", "a LoadGen user.conf, laid over mlperf.conf", group="test"),
    Field("audit_conf", "a LoadGen audit.config, for compliance runs", group="test"),
    Field("min_duration", "seconds that the test lasts at least [default: 0, or user_conf's]", not_negative, group="test"),
    Field("min_query_count", "queries (Offline: samples) at least [default: each sample once, or user_conf's]", positive, group="test"),
    Field("server_target_qps", "Server: queries per second", not_negative, group="test"),
    Field("offline_expected_qps", "Offline: sizes the one query, with min_duration", not_negative, group="test"),
    Field("require_valid", "an INVALID result is an error (exit code 4)", boolean, False, group="test"),
    # what a run leaves
    Field("log_dir", "the run directory [default: build/runs/<time>-<model>-<scenario>]", group="output"),
    Field("save_outputs", "write every answer to outputs.jsonl", boolean, False, group="output"),
    # deadlines
    *(
        Field(f"{phase}_deadline", f"phase {phase}, seconds", seconds, float(value), group="deadlines")
        for phase, value in DEADLINES.items()
    ),
    Field("stall_timeout", "an instance that owes answers may be silent for this many seconds", seconds, 300.0, group="deadlines"),
    Field("heartbeat_timeout", "a rank whose heartbeat is missing for this many seconds is lost", seconds, 30.0, group="deadlines"),
    Field("grace", "seconds that ranks have to end after a failure", seconds, 5.0, group="deadlines"),
)
