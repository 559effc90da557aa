"""Where an answer ends: end tokens, stop words, lengths and cancellation; and what streams before it does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpillm.comms.messages import RequestFlag, ResponseFlag
from tests.helpers.oracle import Tokens, expected_tokens
from tests.helpers.torch_cores import N_OUTPUT, Answers, answer, hands_off, make_batch, make_core, make_pair

# --- the end of an answer ---


@pytest.mark.long
def test_end_tokens_and_lengths(folder: Path, prompts: Tokens, expected: Tokens) -> None:
    ends = (expected[3][5], expected[6][2])
    core = make_core(folder, end_ids=ends)
    assert answer(core, make_batch(prompts)) == expected_tokens(
        folder, prompts, N_OUTPUT, eos_token_id=list(ends)
    )
    assert answer(core, make_batch(prompts, min_output=9)) == expected_tokens(
        folder, prompts, N_OUTPUT, eos_token_id=list(ends), min_new_tokens=9
    )
    assert answer(core, make_batch(prompts, max_output=3)) == expected_tokens(
        folder, prompts, 3, eos_token_id=list(ends)
    )


def until(tokens: list[int], words: list[tuple[int, ...]], min_output: int) -> list[int]:
    """Return the answer as far as the end of the first of these words that may end it."""
    for n in range(min_output, len(tokens)):
        if any(tuple(tokens[:n][-len(word) :]) == word for word in words):
            return tokens[:n]
    return tokens


@pytest.mark.parametrize("min_output", [0, 9])
def test_stop_words(folder: Path, prompts: Tokens, expected: Tokens, min_output: int) -> None:
    words = [tuple(expected[3][4:7]), tuple(expected[5][9:11]), (expected[8][12],), (*expected[9][3:5], 7)]
    core = make_core(folder, stop_words=tuple(words), max_batch_size=7)
    wanted = [until(tokens, words, min_output) for tokens in expected]
    assert len({len(tokens) for tokens in wanted}) >= 4
    assert answer(core, make_batch(prompts, min_output=min_output)) == wanted
    ignore = [i % 2 for i in range(len(prompts))]
    mixed = [whole if i % 2 else cut for i, (whole, cut) in enumerate(zip(expected, wanted, strict=True))]
    assert (
        answer(
            core,
            make_batch(prompts, min_output=min_output, flags=[i * RequestFlag.IGNORE_STOP for i in ignore]),
        )
        == mixed
        != wanted
    )
    pair = make_pair(folder, {"stop_words": tuple(words)}, {"stop_words": tuple(words)})
    assert hands_off(*pair, make_batch(prompts, min_output=min_output, generation=1)) == wanted


def test_end_tokens_come_from_the_model(
    folder: Path, prompts: Tokens, expected: Tokens, tmp_path: Path
) -> None:
    end = expected[3][5]
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folder / name)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [511, end]}))
    assert make_core(tmp_path, end_ids=None).info.end_ids == (511, end)
    assert make_core(folder, end_ids=None).info.end_ids == (257,)


def test_first_and_final_in_one_row(folder: Path, prompts: Tokens, expected: Tokens) -> None:
    core = make_core(folder)
    core.enqueue(make_batch(prompts[:3], max_output=1))
    batch = core.poll_responses()
    assert batch is not None
    assert batch.rows["flags"].tolist() == [ResponseFlag.FIRST | ResponseFlag.FINAL] * 3
    assert batch.tokens.tolist() == [tokens[0] for tokens in expected[:3]]


def test_requests_that_can_never_be_answered(
    folder: Path, prompts: Tokens, expected: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    core = make_core(folder, max_seq_len=64)
    core.enqueue(make_batch([[5] * 60, [], [512], [-1], prompts[3]]))
    answers = Answers().run(core)
    assert sorted(answers.errors) == [0, 1, 2, 3]
    assert answers.final == {4: expected[3]}
    assert "60 prompt tokens and 24 output tokens exceed max_seq_len 64" in caplog.text


def test_health_check_and_warm_up(folder: Path) -> None:
    core = make_core(folder, max_batch_size=16)
    core.run_health_check()
    assert len(answer(core, core.warm_up_requests())) == 16
    core.notify_stop()
    assert not core.has_work()


# --- streaming ---


def test_those_who_stream_get_every_token_when_it_is_there(
    folder: Path, prompts: Tokens, expected: Tokens
) -> None:
    """A request that streams gets all tokens but the last, which comes with the whole answer.

    The others get no extra row.
    """
    core = make_core(folder, kv_cache_tokens=160, max_seq_len=None)
    streams = [i % 2 for i in range(len(prompts))]
    core.enqueue(make_batch(prompts, flags=[i * RequestFlag.STREAM for i in streams]))
    answers = Answers().run(core)
    assert answers.tokens() == expected and core.statistics()["preemptions"] > 3
    assert answers.partial == {i: tokens[1:-1] for i, tokens in enumerate(expected) if streams[i]}


def test_end_tokens_can_be_ignored(folder: Path, prompts: Tokens, expected: Tokens) -> None:
    core = make_core(folder, end_ids=(expected[3][5], expected[6][2]))
    assert answer(core, make_batch(prompts, flags=RequestFlag.IGNORE_END)) == expected


# --- cancelling ---


def test_cancelled_requests(folder: Path, prompts: Tokens, expected: Tokens) -> None:
    """Requests that wait, compute a context or generate are cancelled; refused and unknown ones are not.

    The others are answered.
    """
    core = make_core(folder, max_batch_size=3, max_num_tokens=10)
    core.enqueue(make_batch([prompts[1], [5] * 30, *prompts[2:7], []]))
    answers = Answers()
    answers.poll(core)
    answers.poll(core)
    assert [(s.id, len(s.output), s.n_uncached) for s in core.engine.scheduler.running] == [
        (0, 2, 1),
        (1, 0, 13),
    ]
    core.cancel([0, 1, 6, 7, 99])
    core.cancel([0])
    answers.run(core)
    assert sorted(answers.cancelled) == [0, 1, 6]
    assert answers.errors == [7]
    assert answers.tokens() == expected[2:6]
    core.cancel([2])
    assert not core.has_work()
    assert core.engine.blocks.n_free == core.engine.blocks.n_blocks
