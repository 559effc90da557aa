"""Guesses change no answer, whatever they are, in every state of the scheduler; and each block comes back."""

from __future__ import annotations

import zlib
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.errors import ConfigError
from mpillm.engine.engine import Engine
from mpillm.engine.schedule.prefix_cache import PrefixCache
from mpillm.engine.schedule.sampling_params import SamplingParams
from mpillm.engine.schedule.sequence import Sequence
from mpillm.engine.shape.speculative_config import SpeculativeConfig
from mpillm.engine.speculation.ngram import NGramDrafter
from mpillm.engine.speculation.speculation import Speculation
from tests.helpers.hashing_engine import (
    CHUNKINGS,
    POLICIES,
    VOCAB,
    answer,
    check_blocks,
    check_empty,
    make_engine,
    make_sequences,
    run,
    sequence,
)


class Guesses:
    """Knows what comes next, and is wrong at random places."""

    def __init__(self, share_right: float, random: np.random.Generator, partial_window: int = 0) -> None:
        self._partial_window = partial_window
        self._share_right = share_right
        self._random = random

    def draft(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        drafts = []
        for s, most in wanted:
            assert 0 < most < s.max_output - len(s.output)
            n = int(self._random.integers(most + 1))
            right = answer(s.prompt + s.output, n, partial_window=self._partial_window)
            is_right = self._random.random(len(right)) < self._share_right
            drafts.append([t if ok else (t + 1) % VOCAB for t, ok in zip(right, is_right, strict=True)])
        return drafts


def speculating(engine: Engine, random: np.random.Generator, share_right: float = 0.7, **options: Any) -> Any:
    most = engine.config.max_num_tokens
    guesses = Guesses(share_right, random, engine.info.config.partial_window)
    engine.speculation = Speculation(guesses, engine.scheduler, most, 5, **options)
    return engine.speculation


@pytest.mark.parametrize("n_stages", [1, 2, 3])
@pytest.mark.parametrize("reuse", [False, True], ids=["", "reuse"])
@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("partial_window", [0, 6], ids=["", "window blocks"])
def test_answers_are_those_without_guesses(
    policy: str, chunking: str, reuse: bool, n_stages: int, partial_window: int
) -> None:
    """Requests come at random; some are cancelled at random in any state, or end with a stop word.

    The model hashes what the cache holds, so a guess that stayed in it would show.
    """
    random = np.random.default_rng(zlib.crc32(f"{policy} {chunking} {reuse} {n_stages}".encode()))
    stop = 11
    engine = make_engine(
        policy=policy,
        chunking=chunking,
        reuse=reuse,
        n_stages=n_stages,
        seed=2,
        stop_words=((stop,),),
        partial_window=partial_window,
    )
    speculation = speculating(engine, random)
    sequences = make_sequences(60, random)
    to_come, ended, streamed = deque(sequences), set[int](), dict[int, int]()
    for s in sequences:
        s.stream = s.id % 2 == 0
        s.min_output = 4 * (s.id % 3)
    for _ in range(20_000):
        if to_come and random.random() < 0.3:
            engine.add(to_come.popleft())
        if random.random() < 0.1:
            engine.cancel(int(random.integers(60)))
        for s, _, is_final in engine.step():
            assert s.id not in ended
            streamed[s.id] = streamed.get(s.id, 0) + 1
            ended |= {s.id} if is_final else set()
        check_blocks(engine)
        if not to_come and len(ended) == len(sequences):
            break
    assert ended == set(range(60))
    for s in sequences:
        wanted = answer(s.prompt, s.max_output, partial_window=partial_window)
        ends = [n for n, t in enumerate(wanted, 1) if t == stop and n >= s.min_output]
        wanted = wanted[: min(ends, default=len(wanted))]
        assert s.output == wanted or (s.is_cancelled and s.output == wanted[: len(s.output)])
        if s.stream and not s.is_cancelled:
            assert streamed[s.id] == len(wanted)
    check_empty(engine)
    assert 0 < speculation.accepted_tokens < speculation.drafted_tokens
    assert engine.generated_tokens == sum(len(s.output) for s in sequences)
    if policy != "max_util":
        assert engine.scheduler.preemptions == 0
    if isinstance(engine.blocks, PrefixCache):
        assert engine.blocks.reused_blocks > 0


def test_right_guesses_spare_steps_and_are_counted() -> None:
    """Of 20 tokens the context's step brings one; each of three steps after it five guesses and one more."""
    engine = make_engine(max_num_tokens=64)
    speculation = speculating(engine, np.random.default_rng(0), share_right=1.0)
    speculation._drafter._random = Always()
    one = sequence(0, [1, 2, 3], 20)
    engine.add(one)
    run(engine)
    assert one.output == answer([1, 2, 3], 20)
    assert engine.n_steps == 1 + 4 and engine.generated_tokens == 20
    assert speculation.drafted_tokens == speculation.accepted_tokens == 15


def test_guesses_of_a_cancelled_request_do_not_count() -> None:
    """Nobody reads what the model makes of them."""
    engine = make_engine(n_stages=2, max_num_tokens=64)
    speculation = speculating(engine, np.random.default_rng(0), share_right=1.0)
    speculation._drafter._random = Always()
    one = sequence(0, [1, 2, 3], 20)
    engine.add(one)
    while not one.draft:
        engine.step()
    before = speculation.drafted_tokens, speculation.accepted_tokens
    engine.cancel(0)
    run(engine)
    assert one.is_cancelled and one.output
    assert (speculation.drafted_tokens, speculation.accepted_tokens) == before
    check_empty(engine)


class Always:
    """As a generator of random numbers: as many guesses as are allowed, all right."""

    def integers(self, end: int) -> int:
        return end - 1

    def random(self, n: int) -> np.ndarray[Any, Any]:
        return np.zeros(n)


def test_blocks_of_an_answer_with_guesses_are_found_by_the_next_prompt() -> None:
    """What a step with guesses fills can be reused like anything else."""
    engine = make_engine(reuse=True, max_num_tokens=64)
    speculating(engine, np.random.default_rng(5), share_right=0.5)
    first = sequence(0, [1, 2, 3, 4, 5], 30)
    engine.add(first)
    run(engine)
    context = first.prompt + first.output
    again = sequence(1, [*context[:-1], 9], 5)
    engine.add(again)
    run(engine)
    assert again.output == answer(again.prompt, 5)
    assert again.n_reused == (len(context) - 1) // 4 * 4  # tokens per block


def test_no_guesses_above_max_concurrency_or_without_room() -> None:
    for options in ({"max_concurrency": 2}, {"max_num_tokens": 3}):
        most = options.pop("max_num_tokens", 20)
        engine = make_engine(max_num_tokens=most)
        speculation = speculating(engine, np.random.default_rng(3), share_right=1.0, **options)
        for i in range(3):
            engine.add(sequence(i, [i], 6))
        run(engine)
        assert speculation.drafted_tokens == 0


# --- prompt lookup ---


def naive(context: list[int], longest: int, most: int) -> list[int]:
    """Return what followed the first earlier occurrence of the longest end of `context` that has one."""
    for n in range(min(longest, len(context)), 0, -1):
        for at in range(n, len(context)):
            if context[at - n : at] == context[-n:]:
                return context[at : at + most]
    return []


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.lists(st.integers(0, 3), max_size=20),
    st.integers(1, 5),
    st.data(),
)
def test_a_guess_is_what_followed_before(
    prompt: list[int], output: list[int], longest: int, data: st.DataObject
) -> None:
    """The index reads tokens as they come, one or several at a time."""
    drafter = NGramDrafter(longest)
    s = Sequence(0, prompt, 99, 0, SamplingParams())
    while True:
        most = data.draw(st.integers(1, 6))
        assert drafter.draft([(s, most)]) == [naive(s.prompt + s.output, longest, most)]
        if len(s.output) == len(output):
            break
        s.output = output[: len(s.output) + data.draw(st.integers(1, len(output) - len(s.output)))]
    s.is_done = True
    drafter.draft([])
    assert not drafter._of


# --- the option ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "decoding_type None: the torch core has NGram, Draft_Target, Eagle"),
        (
            {"decoding_type": "Ngram"},
            "Ngram: the torch core has NGram, Draft_Target, Eagle, MTP (did you mean 'NGram'?)",
        ),
        ({"decoding_type": ["NGram"]}, "decoding_type ['NGram']: the torch core has NGram"),
        ({"decoding_type": "NGram", 5: 1}, "--speculative_config 5: decoding_type NGram of the torch"),
        ({"decoding_type": "NGram"}, "decoding_type NGram needs max_draft_len"),
        (
            {"decoding_type": "NGram", "max_draft_len": 0},
            "max_draft_len 0: must be a whole number of at least 1",
        ),
        ({"decoding_type": "NGram", "max_draft_len": True}, "max_draft_len True: must be a whole number"),
        (
            {"decoding_type": "NGram", "max_draft_len": 4, "max_matching_ngram_sise": 2},
            "has decoding_type, max_draft_len, max_concurrency, max_matching_ngram_size"
            " (did you mean 'max_matching_ngram_size'?)",
        ),
        ({"decoding_type": "Draft_Target", "max_draft_len": 4}, "Draft_Target needs speculative_model"),
        (
            {"decoding_type": "Draft_Target", "max_draft_len": 4, "speculative_model": 7},
            "speculative_model 7: must be a path",
        ),
    ],
    ids=str,
)
def test_wrong_options_of_speculation(options: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        SpeculativeConfig.read(options)
    assert str(error.value).startswith("--speculative_config") and message in str(error.value)
    assert error.value.about == ("speculative_config",)
