"""Synthetic conversations: sizes, shared beginnings, and equal results for equal seeds."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm.data.chat_request import ChatRequests
from mpillm.data.conversation_dataset import synthetic_conversations
from mpillm.data.dataset import Dataset, PromptLimits, Synthetic, load_dataset
from mpillm.data.generated_history import TokenHistory
from mpillm.data.synthetic_conversations import SyntheticConversations, generate
from mpillm.data.tokenizer import ByteTokenizer, NoTokenizer
from mpillm.options.fields import AllFields
from mpillm.options.synthetic_conversations import sizes_of

LIMITS = PromptLimits(max_output_len=512)


def spec(text: str, n: int = 3, seed: int = 7) -> SyntheticConversations:
    return SyntheticConversations(sizes_of(AllFields.synthetic_conversations.parse(text, "")), n, seed)


def dataset(text: str, n: int = 3, seed: int = 7, limits: PromptLimits = LIMITS, **more: Any) -> Dataset:
    return synthetic_conversations(spec(text, n, seed), ByteTokenizer(), limits, **more)


def prompts(dataset: Dataset) -> list[list[int]]:
    return [dataset.sample(i).tolist() for i in range(len(dataset))]


def test_first_prompts_share_the_system_prompt_and_the_prefix_of_their_group() -> None:
    made = prompts(dataset("turns=1,input=10,system=30,groups=2,prefix=20", 4))
    assert [len(prompt) for prompt in made] == [60] * 4
    assert len({tuple(prompt[:30]) for prompt in made}) == 1
    groups = [tuple(prompt[30:50]) for prompt in made]
    assert groups[0] == groups[2] != groups[1] == groups[3]
    assert len({tuple(prompt[50:]) for prompt in made}) == 4


def test_recorded_responses_are_in_later_prompts_which_share_their_tokens() -> None:
    made = dataset("turns=3,input=10,output=5,system=4", 2, are_generated=False)
    assert made.turns is not None and not made.turns.are_generated
    assert made.n_tokens.tolist() == [14, 29, 44] * 2 and len(made.tokens) == 88
    first, second, third, other, *_ = prompts(made)
    assert third[:29] == second and second[:14] == first and other[:4] == first[:4] and other != first
    assert made.output_lengths is not None and made.output_lengths.tolist() == [5] * 6


def test_by_default_responses_are_those_of_the_test() -> None:
    made = dataset("turns=3,input=10,output=5,delay=0.5", 2)
    assert made.turns is not None and made.turns.are_generated
    assert made.n_tokens.tolist() == [10] * 6
    assert made.turns.delay_s.tolist() == [0, 0.5, 0.5] * 2
    history = TokenHistory(made.turns.conversations, PromptLimits(max_seq_len=30, max_output_len=5))
    buffer = np.arange(3, dtype=np.int32)
    response = history.message(buffer[:2])
    buffer[:] = 9
    second = history.prompt(0, [response]).tolist()
    assert second[:12] == [*made.sample(0).tolist(), 0, 1] and len(second) == 22
    with pytest.raises(ConfigError, match=r"^synthetic conversation 0, turn 2: the prompt has 34 tokens"):
        history.prompt(0, [response, response])


def test_the_same_seed_makes_the_same_conversations_everywhere() -> None:
    """The digest is a constant: it must not change with the machine, or with the version of NumPy."""
    text = "turns=2-6,input=20:8,output=3-9,delay=1:0.5,system=5,groups=2,prefix=3"
    made = dataset(text, 20, are_generated=False)
    assert made.turns is not None
    delays = np.round(made.turns.delay_s, 6).astype("<f8")
    state = hashlib.sha256(made.tokens.astype("<i4").tobytes() + made.n_tokens.astype("<i8").tobytes())
    state.update(delays.tobytes())
    assert state.hexdigest()[:16] == "6787f7a1902ebc08"
    assert prompts(made) == prompts(dataset(text, 20, are_generated=False))
    assert prompts(made)[0] != prompts(dataset(text, 20, seed=8, are_generated=False))[0]


def test_more_conversations_begin_with_the_same_ones() -> None:
    few, many = (prompts(dataset("turns=3,input=20:8", n, are_generated=False)) for n in (3, 9))
    assert many[: len(few)] == few


def test_distributions() -> None:
    made = generate(spec("turns=3-8,input=200:40,output=100-300,delay=2:1", 2000), ByteTokenizer(), 256)
    counts = np.array([len(one.turns) for one in made])
    assert set(counts.tolist()) == {3, 4, 5, 6, 7, 8} and counts.mean() == pytest.approx(5.5, rel=0.05)
    turns = [turn for one in made for turn in one.turns[1:]]
    inputs = np.array([len(turn.tokens) for turn in turns if turn.tokens is not None])
    assert inputs.mean() == pytest.approx(200, rel=0.02) and inputs.std() == pytest.approx(40, rel=0.05)
    outputs = np.array([turn.output_len for turn in turns])
    assert (outputs.min(), outputs.max()) == (100, 300) and outputs.mean() == pytest.approx(200, rel=0.02)
    delays = np.array([turn.delay_s for turn in turns])
    assert delays.min() == 0.0 and np.median(delays) == pytest.approx(2, rel=0.1)


def test_log_normal_values_have_the_mean_and_the_deviation() -> None:
    made = generate(spec("turns=5,input=lognormal:200:100,delay=lognormal:2:1", 4000), ByteTokenizer(), 256)
    turns = [turn for one in made for turn in one.turns[1:]]
    inputs = np.array([len(turn.tokens) for turn in turns if turn.tokens is not None])
    assert inputs.mean() == pytest.approx(200, rel=0.02) and inputs.std() == pytest.approx(100, rel=0.05)
    assert np.median(inputs) == pytest.approx(200 / np.sqrt(1.25), rel=0.02)
    assert np.mean([turn.delay_s for turn in turns]) == pytest.approx(2, rel=0.03)


def test_groups_of_zipf_sizes() -> None:
    made = prompts(dataset("turns=1,input=1,groups=4,prefix=20,zipf=1", 5000))
    counts = Counter(tuple(prompt[:20]) for prompt in made)
    sizes = np.array([n for _, n in counts.most_common()]) / len(made)
    assert sizes == pytest.approx(np.array([12, 6, 4, 3]) / 25, rel=0.1)
    assert prompts(dataset("turns=1,input=1,groups=4,prefix=20,zipf=1", 50)) == made[:50]


@pytest.mark.long
def test_normal_values_are_clipped() -> None:
    made = generate(spec("turns=1:900,input=2:50,output=1:9", 200), ByteTokenizer(), 256)
    assert {len(one.turns) for one in made} >= {1} and max(len(one.turns) for one in made) <= 1000
    lengths = [turn.output_len for one in made for turn in one.turns if turn.output_len is not None]
    assert min(lengths) == 1


def test_chats_are_texts_of_the_tokens() -> None:
    made = dataset("turns=2,input=4,system=5,prefix=3", 1, are_generated=False, requests=ChatRequests())
    assert made.turns is not None
    (one,) = made.turns.conversations
    assert [message["role"] for message in one.messages(one.recorded_responses[:1])] == [
        *("system", "user", "assistant", "user")
    ]
    same = dataset("turns=2,input=4,system=5,prefix=3", 1, are_generated=False)
    decode = ByteTokenizer().decode
    assert one.system[0]["content"] == decode(same.sample(0)[:5])
    assert one.turns[0].added[0]["content"] == decode(same.sample(0)[5:])
    assert bytes(made.sample(1).astype(np.uint8)).startswith(b'"messages":[{"role":"system","content":')


def test_the_note_has_the_parameters() -> None:
    made = dataset("turns=2,input=4,output=9", limits=PromptLimits(max_output_len=8))
    assert made.name == "synthetic"
    assert made.note == (
        "synthetic conversations: 2 turns; input 4 and output 9 tokens in each turn; delay 0 s;"
        " 0 tokens shared by all; seed 7; 6 of its 6 samples exceed --max_output_len 8 with at most 9"
        " tokens: their answers are cut"
    )


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        (
            "input=10,output=5",
            {"limits": PromptLimits(max_output_len=5, max_seq_len=60), "are_generated": False},
            "synthetic conversation 0, turn 4: the prompt has 70 tokens and does not fit max_seq_len 60",
        ),
        (
            "system=60",
            {"limits": PromptLimits(max_seq_len=60)},
            "synthetic conversation 0, turn 0: the prompt",
        ),
        ("turns=1000", {"n": 1 << 30}, "the conversations have more than 1,000,000 requests"),
        ("turns=1000,input=16777216", {}, "the conversations have more than 1,000,000 requests or 2,147,483"),
        ("turns=1", {"limits": PromptLimits(vocab_size=0)}, "none of the model's 0 tokens is free"),
    ],
)
def test_conversations_that_do_not_fit(text: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        dataset(text, **more)
    assert str(error.value).startswith(message)


def test_a_chat_needs_the_tokenizer() -> None:
    with pytest.raises(ConfigError, match=r"no folder; a chat endpoint needs texts"):
        synthetic_conversations(spec("turns=1"), NoTokenizer("no folder"), LIMITS, requests=ChatRequests())


def test_prompts_of_a_text(tmp_path: Path) -> None:
    text = " ".join(f"word{i}" for i in range(100))
    file = tmp_path / "book.txt"
    file.write_text(text, encoding="utf-8")
    chosen = replace(spec("turns=2,input=40,output=5", 5), text_file=file)
    made = synthetic_conversations(chosen, ByteTokenizer(), LIMITS)
    texts = [bytes(prompt).decode() for prompt in prompts(made)]
    assert all(len(one) == 40 and one in text + text for one in texts) and len(set(texts)) == 5
    single = load_dataset(Synthetic(30.0, 4.0, num_samples=9, text_file=file), ByteTokenizer())
    joined = bytes(single.tokens.astype(np.uint8)).decode()
    assert len(joined) == 270 and joined in text + text


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no token"),
        (b"\xff", "not UTF-8 text"),
        ("é".encode() * ((1 << 24) + 1), "more than 32 MiB"),  # the limit is inside a character
        (None, "No such file or directory"),
    ],
    ids=["empty", "bytes", "large", "missing"],
)
def test_a_text_that_cannot_be_used(tmp_path: Path, content: bytes | None, why: str) -> None:
    file = tmp_path / "book.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^--synthetic_text {file}: {why}"):
        synthetic_conversations(replace(spec("turns=1"), text_file=file), ByteTokenizer(), LIMITS)
