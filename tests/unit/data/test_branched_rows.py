"""Conversations that branch: AIPerf's `dag_jsonl`, read and made a data set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm.data.conversation_dataset import ConversationChoice, load_conversations
from mpillm.data.conversation_rows import read_conversations
from mpillm.data.conversations import Conversation
from mpillm.data.dataset import Dataset, PromptLimits
from mpillm.data.generated_history import GeneratedHistory
from mpillm.data.row_fields import FieldUse
from mpillm.data.tokenizer import ByteTokenizer


def turn(*texts: str, **fields: Any) -> dict[str, Any]:
    """Return a turn. A text `s:A` is a message of the system, any other one of the user."""
    pairs = [("system", text[2:]) if text.startswith("s:") else ("user", text) for text in texts]
    return {"messages": [{"role": role, "content": text} for role, text in pairs], **fields}


def session(name: str, *turns: Any, **fields: Any) -> dict[str, Any]:
    return {"session_id": name, "turns": [*turns], **fields}


def read(*rows: Any, use: FieldUse = FieldUse.UNUSED) -> list[Conversation]:
    return read_conversations(((f"f.jsonl:{n}", row) for n, row in enumerate(rows, 1)), 1000, use=use)


def branches(conversation: Conversation) -> list[tuple[str, int, int | None]]:
    return [(branch.conversation.name, branch.after, branch.join) for branch in conversation.branches]


BACKGROUND = {"child": "f", "background": True}
TREE = [
    session("s", turn("s:S", "D", extra={"temperature": 0.5})),
    session(
        "r",
        turn("A", spawns=["s"], forks=[BACKGROUND], tools=[{"type": "function"}], max_tokens=3),
        turn("B", delay=1500, model="m"),
        turn("C", forks=["g"]),
    ),
    session("f", turn("E", spawns=[{"children": ["t", "u"]}])),
    session("g", turn("F")),
    *(session(name, turn(name)) for name in "tu"),
]


def test_forks_and_spawns() -> None:
    """Children begin anew, or with the conversation so far; the turn after a spawn waits for it."""
    (root,) = read(*TREE, use=FieldUse.SAMPLING)
    assert [one.name for one in root.tree()] == ["r", "f", "t", "u", "s", "g"]
    assert branches(root) == [("f", 0, None), ("s", 0, 1), ("g", 2, None)]
    fork, child, _, spawned, last = [*root.tree()][1:]
    assert branches(fork) == [("t", 0, None), ("u", 0, None)], "nothing waits for spawns of the last turn"
    assert [one.parent and one.parent.name for one in root.tree()] == [None, "r", "f", "f", "r", "r"]
    texts = [
        [one["content"] for one in c.messages([None] * (len(c.history) - 1))] for c in (fork, spawned, last)
    ]
    assert texts == [["A", "E"], ["S", "D"], ["A", "B", "C", "F"]]
    assert child.n_inherited == 0 and fork.tools == last.tools == root.tools != spawned.tools
    assert (root.turns[0].output_len, root.turns[1].delay_s) == (3, 1.5)
    assert root.turns[1].unused == {"model"} and spawned.turns[0].own.sampling == {"temperature": 0.5}
    assert not root.has_responses and not fork.has_responses and spawned.has_responses


def test_a_later_turn_may_join() -> None:
    first = turn("A", spawns=["x", {"children": ["y", "z"], "join_at": 2}])
    (root,) = read(session("r", first, turn("B"), turn("C")), *(session(name, turn(name)) for name in "xyz"))
    assert branches(root) == [("x", 0, 1), ("y", 0, 2), ("z", 0, 2)]


def test_each_place_that_names_a_session_has_a_copy_of_it() -> None:
    rows = [
        session("a", turn("A", spawns=["c"])),
        session("b", turn("B", spawns=["c"])),
        session("c", turn("C")),
    ]
    a, b = read(*rows)
    assert branches(a) == [("c", 0, None)] and branches(b) == [("c#2", 0, None)]
    assert [*b.tree()][1].parent is b and [*a.tree()][1].turns is [*b.tree()][1].turns


def two(**fields: Any) -> list[Any]:
    """Return a session whose only turn has these fields, and a session that it may name."""
    return [session("r", turn("A", **fields)), session("c", turn("C"))]


CIRCLE = [session("a", turn("A", spawns=["b"])), session("b", turn("B", spawns=["a"]))]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (two(spawns=["d"]), '1: turns[0]: spawns[0]: no session "d" in the file'),
        (two(forks=["cc"]), """1: turns[0]: forks[0]: no session "cc" in the file (did you mean 'c'?)"""),
        (CIRCLE, '2: turns[0]: spawns[0]: session "a" begins itself: "a > b > a"'),
        (
            [session("r", turn("A", spawns=["a"])), *CIRCLE],
            '3: turns[0]: spawns[0]: session "a" begins itself',
        ),
        (two(forks=["r"]), '1: turns[0]: forks[0]: session "r" begins itself: "r > r"'),
        (
            [*two(forks=["c"]), session("q", turn("Q", forks=["c"]))],
            '3: turns[0]: forks[0]: session "c" is forked, and named in two places; a forked',
        ),
        (two(forks=["c"], spawns=["c"]), '1: turns[0]: spawns[0]: session "c" is forked, and named in two'),
        (
            [session("r", turn("A", forks=["c"])), session("c", turn("s:S", "C"))],
            "2: turns[0]: a message of the system, but the session is forked",
        ),
        ([session("r", turn("A"), turn("s:S"))], "1: turns[1]: a message of the system; must be in turns[0]"),
        (two(spawns=["c", "c"]), '1: turns[0]: spawns[1]: session "c" is twice in spawns'),
        (two(spawns="c"), '1: turns[0]: spawns is "c"; must be an array'),
        (two(spawns=[3]), "1: turns[0]: spawns[0] has 3; must be a session_id"),
        (two(spawns=[{"children": []}]), "1: turns[0]: spawns[0]: children is []; must be an array of names"),
        (two(spawns=[{"child": "c"}]), '1: turns[0]: spawns[0]: "child" is not a field of AIPerf'),
        (
            two(spawns=[{"children": ["c"], "join_at": 0}]),
            "1: turns[0]: spawns[0]: join_at is 0; must be a later",
        ),
        (
            two(forks=[{"child": "c", "background": 1}]),
            "1: turns[0]: forks[0]: background is 1; must be true or",
        ),
        (
            [session("r", turn("A", forks=["c"]), turn("B")), session("c", turn("C"))],
            "1: turns[0]: forks[0]: the session has later turns, but ends at a fork; fork after",
        ),
        (
            two(dealy=3),
            """1: turns[0]: "dealy" is not a field of AIPerf's dag_jsonl (did you mean 'delay'?)""",
        ),
        (two(delay=-1), "1: turns[0]: delay is -1; must be a number from 0"),
        (two(max_tokens=True), "1: turns[0]: max_tokens is true; must be a number of tokens"),
        (two(tools={}), "1: turns[0]: tools is {}; must be an array"),
        (two(extra=3), "1: turns[0]: extra is 3; must be an object"),
        (two(messages=[]), "1: turns[0]: messages is []; must be an array of messages"),
        (
            [session("r", turn("A"), turn("B", tools=[{}]))],
            "1: turns[1]: tools are not those of turns[0]; must be equal, or missing",
        ),
        ([session("r", turn("A"), 3)], "1: turns[1]: is 3; must be an object"),
        ([{**two()[0], "name": 1}], '1: "name" is not a field of AIPerf\'s dag_jsonl'),
        (
            [session("r", turn("A"), pre_session_spawns=["c"])],
            '1: pre_session_spawns is ["c"]; mpillm does not',
        ),
        (
            [session("r", orchestrator=True, spawns=["c"])],
            "1: orchestrator is true; mpillm does not support it",
        ),
        ([session("r", orchestrator=False)], "1: turns is []; must be an array of turns"),
        (
            [session("r", turn("A"), context_mode="message_array_with_responses")],
            '1: context_mode is "message_array_with_responses"; mpillm does not support it',
        ),
        ([{"turns": [turn("A")]}], "1: session_id is null; must be a text"),
        ([session("r", turn("A"))] * 2, "2: r is also the name of an earlier conversation"),
    ],
)
def test_a_wrong_session_is_named(rows: list[Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(*rows)
    assert str(error.value).startswith(f"f.jsonl:{message}")


def test_depth_and_copies_are_bounded() -> None:
    chain = [session(str(i), turn("A", forks=[str(i + 1)])) for i in range(101)]
    with pytest.raises(ConfigError, match=r"f.jsonl:101: turns\[0\]: forks\[0\]: more than 100 branches of"):
        read(*chain, session("101", turn("A")))
    assert len([*read(*chain[:100], session("100", turn("A")))[0].tree()]) == 101
    long = session("c", *[turn("C")] * 20_000)
    with pytest.raises(ConfigError, match=r"f.jsonl:52: .*: the branches have more than 1,000,000 requests"):
        read(*(session(str(i), turn("A", spawns=["c"])) for i in range(52)), long)


def load(folder: Path, *rows: Any, are_generated: bool | None = None, longest: int | None = None) -> Dataset:
    (file := folder / "f.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    choice, limits = ConversationChoice(max_input_len=longest), PromptLimits(max_output_len=9)
    return load_conversations(file, ByteTokenizer(), limits, are_generated=are_generated, choice=choice)


def test_a_fork_continues_with_the_responses_of_its_parents(tmp_path: Path) -> None:
    dataset = load(tmp_path, {"prompt": "X"}, *TREE)
    turns = dataset.turns
    assert turns is not None and turns.are_generated and turns.has_branches
    assert turns.roots.tolist() == [0, 1] and turns.first.tolist() == [0, 1, 4, 5, 6, 7, 8, 9]
    history = GeneratedHistory(turns.conversations, ByteTokenizer(), PromptLimits(max_output_len=9))
    responses = [history.message(np.array([*text], np.int32)) for text in (b"1", b"2", b"3")]
    tools = '{"type": "function"}\n'  # of the parent
    assert bytes(history.prompt(6, responses).tolist()).decode() == f"{tools}A\n1\nB\n2\nC\n3\nF"
    assert bytes(history.prompt(2, responses[:1]).tolist()).decode() == f"{tools}A\n1\nE"
    assert bytes(dataset.sample(7).tolist()) == b"S\nD", "a spawned session's first prompt is in the data set"
    with pytest.raises(ConfigError, match=r"f.jsonl:1: turns\[0\]: the file has no response to this request"):
        load(tmp_path, *two(forks=["c"]), are_generated=False)


def test_a_long_prompt_leaves_its_whole_tree_out(tmp_path: Path) -> None:
    rows = [session("r", turn("A", spawns=["c"])), session("c", turn("C" * 50)), session("o", turn("O"))]
    dataset = load(tmp_path, *rows, longest=20)
    assert dataset.turns is not None and [one.name for one in dataset.turns.conversations] == ["o"]
    assert "conversations with a prompt of more than 20 tokens, which are left out: 1" in dataset.note
