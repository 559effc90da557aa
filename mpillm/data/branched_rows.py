"""Conversations that branch, in the form `dag_jsonl` of AIPerf.

Source: the reader, the validator and the orchestrator of AIPerf 0.13.0. A row is a session: `session_id` and
`turns`. A turn has the `messages` that it adds, and may have `max_tokens`, `tools`, `extra`, `delay` (in
milliseconds), `model`, and the sessions that begin after its response:

- `forks` begin with the conversation so far. An entry is a session's name, and the parent ends. With
  `{"child": name, "background": true}`, the parent continues.
- `spawns` begin anew. The next turn waits for them. With `{"children": [names], "join_at": turn}`, that turn
  does. Nothing waits for the spawns of the last turn.

A session that no other one names is a conversation of the test. Each place that names a session has a copy of
it. mpillm differs from AIPerf in these points:

- A turn that waits keeps its delay, which counts from the end of the last branch. The first delay of a
  branch counts from the response before it. AIPerf drops both.
- A request that fails ends its session. AIPerf sends the next one.
- A conversation is open until its branches have ended, as in AIPerf's replay of agents. With `dag_jsonl`,
  AIPerf counts it until its own last response.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from disagg.errors import ConfigError, nearest
from mpillm.data.conversations import Branch, Conversation, Turn, append
from mpillm.data.records import chat_of, length_of, seconds_of, tools_of
from mpillm.data.row_fields import FieldUse, own_fields
from mpillm.files import excerpt

_SESSION_KEYS = ("session_id", "turns")
_TURN_KEYS = ("messages", "model", "max_tokens", "tools", "extra", "delay", "forks", "spawns")
# Fields of sessions without requests, and of children before the first turn; the values without effect
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "orchestrator": (None, False), "spawns": (None, []), "pre_session_spawns": (None, []), "rounds": (None,),
    "think_time_ms": (None,), "think_time_sigma": (None,), "think_time_min_ms": (None,),
    "think_time_max_ms": (None,), "context_mode": (None, "deltas_without_responses"),
}  # fmt: skip
_MAX_DEPTH = 100  # branches of branches; bounds the recursion also
_MAX_COPIED = 1_000_000  # requests of sessions that several places name, of a file


@dataclass(frozen=True, slots=True)
class _Reference:
    where: str  # of the name, in the file
    name: str  # of the session that begins
    after: int  # turn
    join: int | None
    is_fork: bool


@dataclass(slots=True)
class _Session:
    where: str
    conversation: Conversation
    references: list[_Reference]
    fork: _Reference | None = None  # the place that forks it
    is_named: bool = False
    n_copies: int = 0


def is_branched(row: Any) -> bool:
    """Return whether a row is a session of this form."""
    if not isinstance(row, dict):
        return False
    turns = row.get("turns")
    own = {"messages", "forks", "spawns"}
    has_own = isinstance(turns, list) and any(isinstance(one, dict) and own & one.keys() for one in turns)
    return has_own or ("session_id" in row and "orchestrator" in row)


@dataclass
class BranchedRows:
    """The sessions of a file, which its later rows may name."""

    _sessions: dict[str, _Session] = field(default_factory=dict)
    _n_copied: int = 0  # requests

    def add(self, where: str, row: Mapping[str, Any], conversation: Conversation, use: FieldUse) -> None:
        """Add the turns of a row to its conversation. Raises ValueError that names a wrong field."""
        if not isinstance(row.get("session_id"), str) or not row["session_id"]:
            raise ValueError(f"session_id is {excerpt(row.get('session_id'))}; must be a text")
        for key, unused in _UNSUPPORTED.items():
            if row.get(key) not in unused:
                raise ValueError(f"{key} is {excerpt(row[key])}; mpillm does not support it")
        _check_keys(row, (*_SESSION_KEYS, *_UNSUPPORTED))
        turns, references = row.get("turns"), list[_Reference]()
        if not isinstance(turns, list) or not turns:
            raise ValueError(f"turns is {excerpt(turns)}; must be an array of turns")
        for i, turn in enumerate(turns):
            place = f"turns[{i}]"
            try:
                append(conversation, _turn(f"{where}: {place}", turn, use))
                _check_turn(conversation, turn)
                references += _references(f"{where}: {place}", turn, i, len(turns))
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
        self._sessions[conversation.name] = _Session(where, conversation, references)

    def link(self) -> None:
        """Make sessions branches of those that name them. Raises ConfigError with the place of a name."""
        for session in self._sessions.values():
            for reference in session.references:
                self._check(reference)
        for session in self._sessions.values():
            if not session.is_named:
                self._place(session, session.where, ())
        for session in self._sessions.values():
            if not session.n_copies:  # in a circle, or below one: so one of these raises
                self._place(session, session.where, ())

    def _check(self, reference: _Reference) -> None:
        session = self._sessions.get(reference.name)
        if session is None:
            known = nearest(reference.name, self._sessions)
            raise ConfigError(f"{reference.where}: no session {excerpt(reference.name)} in the file{known}")
        if session.is_named and (reference.is_fork or session.fork is not None):
            raise ConfigError(
                f"{reference.where}: session {excerpt(reference.name)} is forked, and named in two places; a"
                " forked session has one parent"
            )
        session.is_named = True
        if reference.is_fork:
            session.fork = reference
            if _has_system(session.conversation.turns[0]):
                raise ConfigError(
                    f"{session.where}: turns[0]: a message of the system, but the session is forked, and so"
                    " continues a conversation"
                )

    def _place(
        self, session: _Session, where: str, path: tuple[str, ...], parent: Conversation | None = None
    ) -> Conversation:
        """Return the session with its branches; a copy after its first place. `path`: its parents' names."""
        conversation, name = session.conversation, session.conversation.name
        if name in path:
            circle = " > ".join([*path[path.index(name) :], name])
            raise ConfigError(f"{where}: session {excerpt(name)} begins itself: {excerpt(circle)}")
        if len(path) > _MAX_DEPTH:
            raise ConfigError(f"{where}: more than {_MAX_DEPTH} branches of branches")
        session.n_copies += 1
        if session.n_copies > 1:
            self._n_copied += len(conversation.turns)
            if self._n_copied > _MAX_COPIED:
                raise ConfigError(f"{where}: the branches have more than {_MAX_COPIED:,} requests")
            conversation = replace(conversation, name=f"{name}#{session.n_copies}", branches=[])
        conversation.parent = parent
        if parent is not None and session.fork is not None:
            conversation.n_inherited = parent.n_inherited + session.fork.after + 1
            conversation.tools = conversation.tools or parent.tools
        for one in session.references:
            child = self._place(self._sessions[one.name], one.where, (*path, name), conversation)
            conversation.branches.append(Branch(child, one.after, one.join))
        return conversation


def _check_keys(row: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in row:
        if key not in known:
            raise ValueError(
                f"{excerpt(key)} is not a field of AIPerf's dag_jsonl{nearest(str(key), known)}; there are"
                f" {', '.join(known)}"
            )


def _turn(where: str, row: Any, use: FieldUse) -> Turn:
    if not isinstance(row, dict):
        raise ValueError(f"is {excerpt(row)}; must be an object")
    _check_keys(row, _TURN_KEYS)
    turn = Turn(where, chat_of(row.get("messages"), "messages"), delay_s=seconds_of(row, "delay", unit=1e-3))
    if row.get("max_tokens") is not None:
        turn.output_len = length_of(row["max_tokens"], "max_tokens")
    turn.own = own_fields({"extra": row.get("extra")}, use)
    turn.unused = turn.own.unused.union(["model"] if row.get("model") is not None else ())
    return turn


def _check_turn(conversation: Conversation, row: Mapping[str, Any]) -> None:
    """Take the tools of a first turn. Raises ValueError for others later, or a later system message."""
    tools = tools_of(row)
    if len(conversation.turns) == 1:
        conversation.tools = tools
        return
    if tools not in (None, conversation.tools):
        raise ValueError("tools are not those of turns[0]; must be equal, or missing")
    if _has_system(conversation.turns[-1]):
        raise ValueError("a message of the system; must be in turns[0]")


def _has_system(turn: Turn) -> bool:
    return any(message["role"] == "system" for message in turn.added)


def _references(where: str, row: Mapping[str, Any], turn: int, n_turns: int) -> Iterator[_Reference]:
    """Yield the sessions that begin after a turn. Raises ValueError that names a wrong field."""
    for key, read in (("forks", _fork), ("spawns", _spawn)):
        names = set[str]()
        entries = row.get(key, [])
        if not isinstance(entries, list):
            raise ValueError(f"{key} is {excerpt(entries)}; must be an array")
        for i, entry in enumerate(entries):
            place = f"{key}[{i}]"
            try:
                children, join = read(entry, turn, n_turns)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
            for name in children:
                if not isinstance(name, str) or not name:
                    raise ValueError(f"{place} has {excerpt(name)}; must be a session_id")
                if name in names:
                    raise ValueError(f"{place}: session {excerpt(name)} is twice in {key}")
                names.add(name)
                yield _Reference(f"{where}: {place}", name, turn, join, key == "forks")


def _fork(entry: Any, turn: int, n_turns: int) -> tuple[list[Any], int | None]:
    """Return the name that an entry has, and None: no turn waits for it."""
    is_background = False
    if isinstance(entry, dict):
        _check_keys(entry, ("child", "background"))
        entry, is_background = entry.get("child"), entry.get("background", False)
    if not isinstance(is_background, bool):
        raise ValueError(f"background is {excerpt(is_background)}; must be true or false")
    if not is_background and turn + 1 < n_turns:
        raise ValueError(
            "the session has later turns, but ends at a fork; fork after its last turn, or set background"
        )
    return [entry], None


def _spawn(entry: Any, turn: int, n_turns: int) -> tuple[list[Any], int | None]:
    """Return the names that an entry has, and the turn that waits for them; None: none does."""
    if not isinstance(entry, dict):
        entry = {"children": [entry]}
    _check_keys(entry, ("children", "join_at"))
    children, join = entry.get("children"), entry.get("join_at")
    if not isinstance(children, list) or not children:
        raise ValueError(f"children is {excerpt(children)}; must be an array of names")
    if join is None:
        return children, turn + 1 if turn + 1 < n_turns else None
    if type(join) is not int or not turn < join < n_turns:
        raise ValueError(f"join_at is {excerpt(join)}; must be a later turn of the session's {n_turns}")
    return children, join
