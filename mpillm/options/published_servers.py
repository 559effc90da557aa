"""The servers that a published YAML describes: reading its mappings, sizes from flags, models.

A conversion reads a file through `Node`, which records the keys that are read. Every other key is named in a
line, so that no setting is dropped silently.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from disagg.errors import ConfigError
from disagg.schema import BOOLEAN, COUNT, MAPPING, RUN_WIDE, checked

_TEXT = RUN_WIDE["model"]
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
_REUSE = ("kv_cache_config", "enable_block_reuse")
# Flags of vLLM and SGLang, without dashes in front, that correspond to a key of a section.
_FLAGS: dict[str, tuple[str, ...]] = {
    "max-num-seqs": ("max_batch_size",),
    "max-running-requests": ("max_batch_size",),
    "max-num-batched-tokens": ("max_num_tokens",),
    "max-model-len": ("max_seq_len",),
    "context-length": ("max_seq_len",),
    "gpu-memory-utilization": ("kv_cache_config", "free_gpu_memory_fraction"),
    "mem-fraction-static": ("kv_cache_config", "free_gpu_memory_fraction"),
    "kv-cache-dtype": ("kv_cache_config", "dtype"),
    "block-size": ("kv_cache_config", "tokens_per_block"),
    "page-size": ("kv_cache_config", "tokens_per_block"),
    "max-total-tokens": ("kv_cache_config", "max_tokens"),
    "dtype": ("dtype",),
}
_LOAD = "load-format"
_SWITCHES = {
    "enable-prefix-caching": (_REUSE, True),
    "no-enable-prefix-caching": (_REUSE, False),
    "disable-radix-cache": (_REUSE, False),
    "enable-chunked-prefill": (("enable_chunked_prefill",), True),
    "no-enable-chunked-prefill": (("enable_chunked_prefill",), False),
}
_PLACEHOLDERS = "<>{}$"  # a name with one of them stands for another one
_FP8 = ("fp8_e4m3", "fp8")  # a KV cache's type in SGLang and vLLM, and in TensorRT-LLM


class Node:
    """A mapping of a file. Raises ConfigError for a value of a wrong type."""

    def __init__(self, data: Mapping[str, Any], source: str, path: str = "") -> None:
        self.data, self.source, self.path = data, source, path
        self.lines: list[str] = []
        self._unread = dict.fromkeys(data)
        self._children: list[Node] = []

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def where(self, key: str) -> str:
        """Return the place of a key, for errors."""
        return f"{self.source}: {self.name(key)}"

    def get(self, key: str) -> Any:
        self._unread.pop(key, None)
        return self.data.get(key)

    def count(self, *names: str, default: int | None = None) -> int:
        """Return the value of the first of these names that the mapping has."""
        values = {name: value for name in names if (value := self.get(name)) is not None}
        for name, value in values.items():
            return int(checked(self.where(name), value, COUNT))
        if default is None:
            raise ConfigError(f"{self.where(names[0])}: missing; must be the number of servers")
        return default

    def is_on(self, key: str) -> bool:
        value = self.get(key)
        return value is not None and checked(self.where(key), value, BOOLEAN)

    def text(self, key: str) -> str:
        return str(checked(self.where(key), self.get(key), _TEXT))

    def child(self, key: str, data: Mapping[str, Any] | None = None) -> Node:
        """Return the mapping under `key`; it is empty if there is none. `data`: the mapping, if converted."""
        if data is None:
            value = self.get(key)
            data = checked(self.where(key), {} if value is None else value, MAPPING)
        node = Node(data, self.source, self.name(key))
        node.lines = self.lines
        self._children.append(node)
        return node

    def take(self) -> Mapping[str, Any]:
        """Return the whole mapping."""
        self._unread.clear()
        return self.data

    def unused(self) -> Iterator[str]:
        """Yield a line for each mapping below this one that has unread keys."""
        for node in self._children:
            if node.unread:
                yield f"{node.path}: not used here: {node.unread}"
            yield from node.unused()

    def all_unread(self) -> Iterator[str]:
        """Yield the keys of this mapping and of the mappings below it that are not read."""
        yield from self._unread
        for node in self._children:
            yield from node.all_unread()

    @property
    def unread(self) -> str:
        """The names of the keys that are not read."""
        return ", ".join(self._unread)


def is_mapping(data: Mapping[str, Any], *keys: str) -> bool:
    return all(isinstance(data.get(key), Mapping) for key in keys)


def model_of(node: Node, key: str) -> dict[str, str]:
    """Return the model of a recipe. A name that only its cluster knows is left out, with a line."""
    if node.get(key) is None:
        return {}
    model = node.text(key).removeprefix("hf:").removeprefix("//")
    if "/" in model and "://" not in model and not any(mark in model for mark in _PLACEHOLDERS):
        return {"model": model}
    node.lines.append(f"{node.name(key)} {model}: neither a folder nor a hub name")
    return {}


def n_ranks_of(section: Mapping[str, Any]) -> int:
    """Return the ranks per instance of a section."""
    return math.prod(size for name in _SIZES if type(size := section.get(name)) is int)


def check_gpus(node: Node, key: str, section: Mapping[str, Any], n_copies: int = 1) -> None:
    """Add a line if a recipe's number of GPUs per server is not the number of ranks per instance."""
    if node.get(key) is None:
        return
    n_gpus, n_ranks = node.count(key), n_ranks_of(section)
    if n_gpus != n_ranks * n_copies:
        node.lines.append(
            f"{node.name(key)} {n_gpus}: by its sizes, the server has {n_ranks * n_copies} ranks"
        )


def section_of_flags(node: Node, is_sglang: bool) -> tuple[dict[str, Any], int]:
    """Return the section that flags of vLLM or SGLang describe, and the model copies of one server.

    With data-parallel attention, the ranks of a server share its experts, as in one TP group.
    """
    section: dict[str, Any] = {}

    def put(key: Sequence[str], value: Any) -> None:
        into = section if len(key) == 1 else section.setdefault(key[0], {})
        into[key[-1]] = value

    n_copies, tp = 1, node.count("tensor-parallel-size", "tp-size", "tp", default=1)
    dp = node.count("data-parallel-size", "dp-size", "dp", default=1)
    if is_sglang:
        shares = node.is_on("enable-dp-attention") or node.count("attn-dp-size", default=1) > 1
        n_copies = 1 if shares else dp
        ep = node.count("expert-parallel-size", "ep-size", "ep", default=1)
    else:
        shares, tp = dp > 1, tp * dp
        ep = tp if node.is_on("enable-expert-parallel") else 1
    section |= {"tensor_parallel_size": tp, "moe_expert_parallel_size": ep}
    if (pp := node.count("pipeline-parallel-size", "pp-size", "pp", default=1)) > 1:
        section["pipeline_parallel_size"] = pp
    if shares:
        section["enable_attention_dp"] = True
    for flag, key in _FLAGS.items():
        if (value := node.get(flag)) is not None:
            put(key, _FP8[1] if value == _FP8[0] else value)
    if node.data.get(_LOAD) == "dummy":  # other formats differ in the time to load only
        put(("load_format",), node.get(_LOAD))
    for flag, (key, meaning) in _SWITCHES.items():
        if node.data.get(flag) is not None:
            put(key, node.is_on(flag) is meaning)
    if (chunk := node.get("chunked-prefill-size")) is not None:
        section["enable_chunked_prefill"] = chunk != -1
        if chunk != -1:
            section["max_num_tokens"] = chunk
    return section, n_copies


def parsed_flags(args: Sequence[Any]) -> dict[str, Any]:
    """Return command-line arguments by flag, without its dashes; a flag without a value is True."""
    flags: dict[str, Any] = {}
    flag = ""
    for arg in map(str, args):
        if re.match(r"--?[A-Za-z]", arg):
            flag, equals, value = arg.lstrip("-").partition("=")
            flags[flag] = _value(value) if equals else True
        elif flag and flags[flag] is True:
            flags[flag] = _value(arg)
    return flags


def _value(text: str) -> Any:
    if re.fullmatch(r"-?\d{1,15}", text):
        return int(text)
    if re.fullmatch(r"\d{0,9}\.\d{1,9}", text):
        return float(text)
    return {"true": True, "false": False}.get(text.lower(), text)
