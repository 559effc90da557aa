"""Two torch cores, one for contexts and one for generation, give the answers of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpillm.comms.messages import RequestFlag
from tests.helpers.oracle import Tokens
from tests.helpers.torch_cores import Answers, answer, hands_off, make_batch, make_core, make_pair


@pytest.mark.parametrize(
    "context",
    [{}, {"max_num_tokens": 30, "kv_cache_tokens": 128, "max_seq_len": None}],
    ids=["roomy", "scarce"],
)
@pytest.mark.parametrize(
    "generation",
    [{"tokens_per_block": 32}, {"kv_cache_tokens": 160, "max_seq_len": None}, {"max_batch_size": 2}],
    ids=["other blocks", "scarce", "small batch"],
)
def test_handed_over_requests_give_the_same_tokens(
    folder: Path, prompts: Tokens, expected: Tokens, context: dict[str, Any], generation: dict[str, Any]
) -> None:
    sender, receiver = make_pair(folder, context, generation)
    assert hands_off(sender, receiver, make_batch(prompts, generation=1)) == expected
    if "kv_cache_tokens" in generation:
        assert receiver.statistics()["preemptions"] > 0
    c = sender.info.config
    assert (
        sender.statistics()["kv_bytes"]
        == sum(map(len, prompts)) * c.n_layers * 2 * c.n_kv_heads * c.head_dim * 4
    )


def test_handed_over_requests_sample_the_same_tokens(folder: Path, prompts: Tokens) -> None:
    fields = {"temperature": 1.0, "top_k": 50, "seed": np.arange(len(prompts))}
    alone = answer(make_core(folder), make_batch(prompts, **fields))
    assert hands_off(*make_pair(folder), make_batch(prompts, generation=1, **fields)) == alone


def test_a_request_of_one_token_is_not_handed_over(folder: Path, prompts: Tokens) -> None:
    core = make_core(folder, role="context")
    core.enqueue(make_batch(prompts[:2], generation=1, max_output=1))
    assert core.started() == []
    assert set(Answers().run(core).final) == {0, 1}
    assert core.engine.blocks.n_free == core.engine.blocks.n_blocks


def test_an_answer_that_ends_with_its_first_token_is_given_up_at_both_ends(
    folder: Path, prompts: Tokens, expected: Tokens
) -> None:
    """Such a request was offered, and its KV cache has moved, before its first token was known."""
    end = {"end_ids": (expected[2][0],)}
    answers = hands_off(*make_pair(folder, end, end), make_batch(prompts, generation=1))
    assert answers[2] == expected[2][:1]
    assert answers == [
        tokens[: tokens.index(end["end_ids"][0]) + 1 if end["end_ids"][0] in tokens else None]
        for tokens in expected
    ]


def test_no_room_is_false_and_never_room_is_an_error(folder: Path) -> None:
    _, core = make_pair(folder, {}, {"kv_cache_tokens": 64, "max_seq_len": None})
    batch = make_batch([[1] * 40], max_output=8, generation=1)
    assert core.receive_kv(batch, 0, 3)
    batch.rows["id"] = 1
    assert not core.receive_kv(batch, 0, 4)
    batch.rows["max_output"] = 60
    with pytest.raises(ValueError, match="exceed max_seq_len 64"):
        core.receive_kv(batch, 0, 4)


def test_what_is_on_its_way_is_limited(folder: Path) -> None:
    """KV caches on their way are limited, because their buffers take memory; one is let through whatever its
    size."""
    _, core = make_pair(folder, {}, {"kv_cache_tokens": 640})
    core.engine.handoffs._max_transfer_tokens = 30
    answers = []
    for i, n in enumerate((40, 10)):
        batch = make_batch([[1] * n], max_output=8, generation=1)
        batch.rows["id"] = i
        answers.append(core.receive_kv(batch, 0, 3 + i))
    assert answers == [True, False]


def test_context_waits_without_work_until_its_cache_is_taken(folder: Path) -> None:
    core, _ = make_pair(folder, {"kv_cache_tokens": 64, "max_seq_len": None})
    core.enqueue(make_batch([[1] * 40, [2] * 40], generation=1))
    assert core.started() == [0]
    answers = Answers().run(core)
    assert set(answers.first) == {0}
    core.release_kv(0)
    assert core.started() == [1]
    assert set(answers.run(core).first) == {0, 1}


def test_contexts_are_offered_a_step_ahead_and_sent_as_they_are_computed(folder: Path) -> None:
    """The receiver is asked while the step before computes; then the pieces leave between the layers."""
    context, generation = make_pair(folder, {"max_num_tokens": 40})
    batch = make_batch([[1] * 40, [2] * 40, [3] * 40, [4] * 40], generation=1)
    context.enqueue(batch)
    assert context.started() == [0, 1]
    context.poll_responses()
    assert context.started() == [2]
    assert generation.receive_kv(batch.split()[1], 0, 7)
    context.send_kv(1, 1, 7)
    seen: list[int] = []
    transfers = context.engine.worker.transfers
    assert transfers is not None
    stored = transfers.layer_stored

    def layer_stored(layer: int) -> None:
        stored(layer)
        seen.append(len(transfers._active[0].pieces))

    transfers.layer_stored = layer_stored  # type: ignore[method-assign]
    context.poll_responses()
    assert seen == [1, 1, 2, 3, 3, 4]
    assert context.poll_kv() == [1]
    generation.poll_responses()
    assert generation.poll_kv() == [1]


def test_a_handed_over_request_streams_on_behind_its_first_token(
    folder: Path, prompts: Tokens, expected: Tokens
) -> None:
    pair = make_pair(folder, {}, {})
    streamed: dict[int, list[int]] = {}
    assert hands_off(*pair, make_batch(prompts, generation=1, flags=RequestFlag.STREAM), streamed) == expected
    assert streamed == {i: tokens[1:-1] for i, tokens in enumerate(expected)}


def test_a_request_that_is_handed_over_and_preempted_is_left_to_its_receiver(folder: Path) -> None:
    """It has no blocks then, as one has that nobody was asked to take."""
    context, _ = make_pair(folder)
    context.enqueue(make_batch([[3] * 15, [4] * 16], generation=1))
    assert context.started() == [0, 1]
    (sequence,) = (one for one in context.engine.scheduler.running if one.id == 1)
    scheduler = context.engine.scheduler
    scheduler.drop(sequence)
    scheduler.free(sequence)
    scheduler.waiting.append(sequence)
    context.cancel([1])
    assert not sequence.is_cancelled
    answers = Answers().run(context)
    assert set(answers.first) == {0, 1} and not answers.cancelled


def test_a_request_that_is_handed_over_is_cancelled_by_its_receiver(folder: Path, prompts: Tokens) -> None:
    context, generation = make_pair(folder, {"max_num_tokens": 20}, {"batch_scheduler_policy": "no_evict"})
    batch = make_batch([[3] * 15, [4] * 16, [5] * 30, [6] * 50], generation=1)
    requests = batch.split()
    context.enqueue(batch)
    assert context.started() == [0, 1, 2]
    context.cancel([0, 1, 2, 3])  # the last one has no memory yet, so nobody was asked to take it
    firsts, finals = Answers(), Answers()
    for i in range(3):
        assert generation.receive_kv(requests[i], 0, slot=i)
        context.send_kv(i, 1, slot=i)
        if i < 2:
            generation.cancel([i])  # on its way
    left, arrived = set(), set()
    for _ in range(1000):
        if context.has_work():
            firsts.poll(context)
        if generation.has_work():
            finals.poll(generation)
        left |= set(context.poll_kv())
        arrived |= set(generation.poll_kv())
    assert firsts.cancelled == [3]
    assert left == arrived == set(firsts.first) == {0, 1, 2}
    for i in range(3):
        context.release_kv(i)
        generation.admit(requests[i], firsts.first[i])
    finals.poll(generation)
    generation.cancel([2])  # in generation
    finals.run(generation)
    assert sorted(finals.cancelled) == [0, 1, 2] and not finals.final
    for core in (context, generation):
        assert core.engine.blocks.n_free == core.engine.blocks.n_blocks
        assert core.engine.scheduler._n_promised == 0
        assert not core.has_work()
