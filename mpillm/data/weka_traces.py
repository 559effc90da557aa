"""Traces of coding agents in Weka's form: the complete prompt of each request, as hashes of its blocks.

Source: the documentation of kv-cache-tester (trace_replay_tester.md), as the readers of AIPerf 0.13 and
GuideLLM 0.8.1 follow it. A trace is an object with `id`, `block_size` (tokens per hash), `hash_id_scope` and
`requests`:

- an API call: `t` (its start, in seconds), `in` and `out` (tokens), `hash_ids`, and `api_time` (its duration,
  in seconds);
- a sub-agent: `type` "subagent", `t`, and its own `requests`. Their `t` are seconds of the trace, or since
  the sub-agent's start if the first one is smaller than that.

The calls of an agent follow each other by `t`. A sub-agent is a branch. It begins after the response that
was the last one before its first call, or after the first response. The first call of the agent that began
after the sub-agent's end waits for it, as in AIPerf.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

from mpillm.data.conversations import Branch, Conversation, Turn, append
from mpillm.data.records import MAX_STAMP_S, Trace, hash_ids_of, length_of, seconds_of
from mpillm.files import excerpt

_BLOCK = 64  # tokens per hash, as kv-cache-tester writes them
_SUB_AGENT = "subagent"
_CALL_TYPES = (None, "n", "s")  # normal and streamed
_ROUNDING_S = 1e-3  # of recorded times


class _AgentCall(NamedTuple):
    where: str  # in the row
    began: float  # seconds of the trace
    ended: float
    row: Mapping[str, Any]
    ready: float = 0.0  # seconds of the trace: end of the agent's calls before it


def is_weka(row: Any) -> bool:
    """Return whether a row is a trace of this form."""
    return isinstance(row, dict) and isinstance(row.get("requests"), list)


def add_weka(where: str, row: Mapping[str, Any], conversation: Conversation, left_out: list[str]) -> None:
    """Add the requests of a trace, and its sub-agents as branches.

    `left_out` gets the places of calls without output tokens. Raises ValueError that names a wrong field.
    """
    scope = row.get("hash_id_scope") or "global"
    if scope not in ("global", "local"):
        raise ValueError(f"hash_id_scope is {excerpt(scope)}; must be local or global")
    local_to = str(row.get("id", where)) if scope == "local" else None
    block = length_of(row.get("block_size", _BLOCK), "block_size")
    sub_agents: list[list[_AgentCall]] = []
    own = _with_output(where, _calls(row["requests"], "requests", 0.0, sub_agents), left_out)
    others = [calls for one in sub_agents if (calls := _with_output(where, one, left_out))]
    others.sort(key=lambda calls: calls[0].began)
    agents = [own, *others] if own else others
    if not agents:
        raise ValueError("requests has no call with output tokens")
    own, *others = agents
    ends, starts = [*accumulate((call.ended for call in own), max)], [call.began for call in own]
    ready = [own[0].began, *(call.ready for call in own[1:])]  # by call: when the client could send it
    for number, calls in enumerate(others, 1):
        after = max(0, bisect_right(ends, calls[0].began) - 1)
        ended = max(call.ended for call in calls)
        join = bisect_left(starts, ended - _ROUNDING_S, after + 1)
        if join < len(own):
            ready[join] = max(ready[join], ended)
        child = Conversation(f"{conversation.name}/{number}", parent=conversation)
        _add_calls(where, child, calls, [ends[after], *(call.ready for call in calls[1:])], block, local_to)
        conversation.branches.append(Branch(child, after, join if join < len(own) else None))
    _add_calls(where, conversation, own, ready, block, local_to)


def _add_calls(
    where: str,
    conversation: Conversation,
    calls: Iterable[_AgentCall],
    ready: Iterable[float],
    block: int,
    local_to: str | None,
) -> None:
    for call, ready_s in zip(calls, ready, strict=True):
        ids = hash_ids_of(call.row, f"{call.where}: hash_ids")
        if local_to is not None:
            ids = tuple(_local_hash(local_to, one) for one in ids)
        length = length_of(call.row.get("in"), f"{call.where}: in")
        turn = Turn(f"{where}: {call.where}", [], prompt=Trace(length, ids, block))
        turn.delay_s = max(0.0, call.began - ready_s)
        turn.output_len = length_of(call.row.get("out"), f"{call.where}: out")
        append(conversation, turn)


def _with_output(where: str, calls: list[_AgentCall], left_out: list[str]) -> list[_AgentCall]:
    """Return the calls with output tokens in their order, with the end of the calls before each."""
    calls = sorted(calls, key=lambda call: call.began)
    ends = accumulate((call.ended for call in calls), max, initial=0.0)
    left_out += [f"{where}: {call.where}" for call in calls if call.row.get("out") == 0]
    return [
        call._replace(ready=end) for call, end in zip(calls, ends, strict=False) if call.row.get("out") != 0
    ]


def _calls(
    requests: list[Any], where: str, start: float, sub_agents: list[list[_AgentCall]] | None = None
) -> list[_AgentCall]:
    """Return the calls of an agent that started at `start`, in seconds of the trace.

    `sub_agents` gets the calls of each sub-agent; None: a sub-agent, which has none.
    """
    offset, calls = 0.0, list[_AgentCall]()
    for i, row in enumerate(requests):
        place = f"{where}[{i}]"
        if not isinstance(row, dict):
            raise ValueError(f"{place} is {excerpt(row)}; must be an object")
        began = seconds_of(row, "t", place, max_s=MAX_STAMP_S)
        if i == 0 and began < start:
            offset = start
        if row.get("type") == _SUB_AGENT and sub_agents is not None:
            inner = row.get("requests")
            if not isinstance(inner, list):
                raise ValueError(f"{place}: requests is {excerpt(inner)}; must be an array of calls")
            sub_agents.append(_calls(inner, f"{place}: requests", began))
        elif row.get("type") in _CALL_TYPES:
            began += offset
            calls.append(_AgentCall(place, began, began + seconds_of(row, "api_time", place), row))
        else:
            known = "n or s" if sub_agents is None else f"n, s or {_SUB_AGENT}"
            raise ValueError(f"{place}: type is {excerpt(row.get('type'))}; must be {known}")
    return calls


def _local_hash(trace: str, hash_id: int) -> int:
    """Return a hash that only this trace has."""
    digest = hashlib.blake2b(f"{hash_id} {trace}".encode(errors="backslashreplace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
