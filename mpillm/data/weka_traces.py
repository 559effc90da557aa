"""Traces of coding agents in Weka's form: the complete prompt of each request, as hashes of its blocks.

Source: the documentation of kv-cache-tester (trace_replay_tester.md), as the readers of AIPerf 0.13 and
GuideLLM 0.8.1 follow it. A trace is an object with `id`, `block_size` (tokens per hash), `hash_id_scope` and
`requests`:

- an API call: `t` (its start, in seconds), `in` and `out` (tokens), `hash_ids`, and `api_time` (its duration,
  in seconds);
- a sub-agent: `type` "subagent", `t`, and its own `requests`. Their `t` are seconds of the trace, or since
  the sub-agent's start if the first one is smaller than that.

The calls of a trace follow each other by `t`. Calls of sub-agents that ran in parallel take turns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mpillm.data.conversations import Turn
from mpillm.data.records import Trace, hash_ids_of, length_of, seconds_of
from mpillm.files import excerpt

_BLOCK = 64  # tokens per hash, as kv-cache-tester writes them
_SUB_AGENT = "subagent"
_CALL_TYPES = (None, "n", "s")  # normal and streamed


class _AgentCall(NamedTuple):
    where: str  # in the row
    began: float  # seconds of the trace
    ended: float
    row: Mapping[str, Any]


def is_weka(row: Any) -> bool:
    """Return whether a row is a trace of this form."""
    return isinstance(row, dict) and isinstance(row.get("requests"), list)


def weka_turns(where: str, row: Mapping[str, Any], left_out: list[str]) -> list[Turn]:
    """Return the requests of a trace. `left_out` gets the places of calls without output tokens.

    Raises ValueError that names a wrong field.
    """
    scope, name = row.get("hash_id_scope") or "global", str(row.get("id", where))
    if scope not in ("global", "local"):
        raise ValueError(f"hash_id_scope is {excerpt(scope)}; must be local or global")
    block = length_of(row.get("block_size", _BLOCK), "block_size")
    turns, ended = list[Turn](), 0.0
    for call in sorted(_calls(row["requests"], "requests"), key=lambda call: call.began):
        delay_s, ended = max(0.0, call.began - ended) if turns else 0.0, max(ended, call.ended)
        if call.row.get("out") == 0:
            left_out.append(f"{where}: {call.where}")
            continue
        ids = hash_ids_of(call.row, f"{call.where}: hash_ids")
        if scope == "local":
            ids = tuple(_local_hash(name, one) for one in ids)
        length = length_of(call.row.get("in"), f"{call.where}: in")
        turn = Turn(f"{where}: {call.where}", [], prompt=Trace(length, ids, block), delay_s=delay_s)
        turn.output_len = length_of(call.row.get("out"), f"{call.where}: out")
        turns.append(turn)
    if not turns:
        raise ValueError("requests has no call with output tokens")
    return turns


def _calls(requests: list[Any], where: str, start: float | None = None) -> Iterator[_AgentCall]:
    """Yield the calls of a trace; of a sub-agent if it has a `start`, in seconds of the trace."""
    offset = 0.0
    for i, row in enumerate(requests):
        place = f"{where}[{i}]"
        if not isinstance(row, dict):
            raise ValueError(f"{place} is {excerpt(row)}; must be an object")
        began = seconds_of(row, "t", place)
        if start is not None and i == 0 and began < start:
            offset = start
        if row.get("type") == _SUB_AGENT and start is None:
            inner = row.get("requests")
            if not isinstance(inner, list):
                raise ValueError(f"{place}: requests is {excerpt(inner)}; must be an array of calls")
            yield from _calls(inner, f"{place}: requests", began)
        elif row.get("type") in _CALL_TYPES:
            began += offset
            yield _AgentCall(place, began, began + seconds_of(row, "api_time", place), row)
        else:
            known = "n or s" if start is not None else f"n, s or {_SUB_AGENT}"
            raise ValueError(f"{place}: type is {excerpt(row.get('type'))}; must be {known}")


def _local_hash(trace: str, hash_id: int) -> int:
    """Return a hash that only this trace has."""
    digest = hashlib.blake2b(f"{hash_id} {trace}".encode(errors="backslashreplace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
