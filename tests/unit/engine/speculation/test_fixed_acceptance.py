"""A given acceptance length: its mean, the tokens of responses, and their independence of other requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm.cores.base import CoreConfig
from mpillm.cores.torch_core import TorchCore
from mpillm.engine.engine import Engine
from mpillm.engine.schedule.sampling_params import SamplingParams
from mpillm.engine.schedule.sequence import Sequence
from mpillm.engine.speculation.fixed_acceptance import FixedAcceptance
from mpillm.engine.speculation.ngram import NGramDrafter
from mpillm.engine.speculation.speculation import Speculation
from tests.helpers.draft_tokens import NGRAM, draft_target
from tests.helpers.engine_configs import engine_config
from tests.helpers.hashing_engine import (
    VOCAB,
    check_blocks,
    check_empty,
    make_engine,
    next_token,
    run,
    sequence,
)
from tests.helpers.oracle import Tokens
from tests.helpers.torch_cores import answer, make_batch, make_core

MAX_DRAFT = 5
END = 7


class Recorder:
    """A proposer of tokens that the model would not choose, and a record of them by output position."""

    def __init__(self, n: int = MAX_DRAFT) -> None:
        self._n = n
        self.proposed: dict[tuple[int, int], int] = {}

    def draft(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        drafts = []
        for s, max_tokens in requests:
            at = len(s.output)
            draft = [(31 * len(s.prompt) + 7 * (at + i)) % VOCAB for i in range(min(self._n, max_tokens))]
            self.proposed |= {(s.id, at + i): token for i, token in enumerate(draft)}
            drafts.append(draft)
        return drafts


def fixed(engine: Engine, length: float, proposer: Recorder | NGramDrafter) -> Speculation:
    acceptance = FixedAcceptance(length, [END])
    engine.speculation = Speculation(
        proposer, engine.scheduler, engine.config.max_num_tokens, MAX_DRAFT, fixed=acceptance
    )
    return engine.speculation


def mean_length(speculation: Speculation) -> float:
    return 1 + speculation.accepted_tokens / speculation.verifications


def long_sequences(n: int, n_output: int) -> list[Sequence]:
    random = np.random.default_rng(4)
    return [
        sequence(i, random.integers(8, VOCAB, 3 + i % 5).tolist(), n_output, ignore_end=True)
        for i in range(n)
    ]


@pytest.mark.parametrize("length", [1.0, 1.25, 2.0, 3.6, 6.0])
@pytest.mark.parametrize("proposer", [Recorder(), Recorder(0), NGramDrafter(2)], ids=["", "none", "ngram"])
def test_the_mean_is_the_given_one(length: float, proposer: Recorder | NGramDrafter) -> None:
    """Only a response's last step may have fewer draft tokens than the rest."""
    engine = make_engine(n_blocks=400, max_num_tokens=400, max_batch_size=16)
    speculation = fixed(engine, length, proposer)
    for one in long_sequences(16, 60):
        engine.add(one)
    run(engine)
    assert mean_length(speculation) == pytest.approx(length, rel=0.05)
    certain = int(length) - 1
    shares = [n / speculation.verifications for n in speculation.accepted_at]
    assert all(share > 0.8 for share in shares[:certain]) and not any(shares[certain + 1 :])
    assert sum(speculation.accepted_at) == speculation.accepted_tokens


@pytest.mark.parametrize("n_stages", [1, 2])
@pytest.mark.parametrize("reuse", [False, True], ids=["", "reuse"])
@pytest.mark.parametrize("n_blocks", [24, 200])
def test_each_token_is_a_draft_token_or_the_model_s(n_blocks: int, reuse: bool, n_stages: int) -> None:
    """The model reads its tokens back from the cache: it has those of the responses, also when it is full."""
    engine = make_engine(n_blocks=n_blocks, reuse=reuse, n_stages=n_stages, seed=3)
    proposer = Recorder()
    speculation = fixed(engine, 2.5, proposer)
    sequences = long_sequences(12, 24)
    for one in sequences:
        engine.add(one)
    run(engine)
    check_blocks(engine)
    n_own = 0
    for one in sequences:
        assert len(one.output) == 24
        for at, token in enumerate(one.output):
            is_own = token == next_token(one.prompt + one.output[:at])
            assert is_own or token == proposer.proposed[one.id, at]
            n_own += is_own
    assert 0 < n_own < 12 * 24
    assert speculation.accepted_tokens > 0
    check_empty(engine)


def test_a_request_s_tokens_do_not_depend_on_the_others() -> None:
    """Each step has space for all draft tokens: then only the request decides."""
    alone, together = [], make_engine(n_blocks=400, max_num_tokens=400, max_batch_size=16)
    for one in long_sequences(8, 30):
        engine = make_engine(n_blocks=400, max_num_tokens=400)
        fixed(engine, 3.3, Recorder())
        engine.add(one)
        run(engine)
        alone.append(one.output)
    fixed(together, 3.3, Recorder())
    sequences = long_sequences(8, 30)
    for one in sequences:
        together.add(one)
        together.step()
    run(together)
    assert [one.output for one in sequences] == alone


def test_requests_that_begin_together_accept_different_numbers() -> None:
    """So a step's tokens vary as with real draft tokens. Other seeds also give other numbers."""
    acceptance = FixedAcceptance(1.5, ())
    sequences = [
        *(Sequence(0, [1, 2, i], 9, 0, SamplingParams(), output=[5]) for i in range(100)),
        *(Sequence(0, [1, 2], 9, 0, SamplingParams(seed=i), output=[5]) for i in range(100)),
    ]
    accepted = [acceptance.n_accepted(one, MAX_DRAFT) for one in sequences]
    assert set(accepted) == {0, 1} and all(30 < sum(half) < 70 for half in (accepted[:100], accepted[100:]))
    assert accepted == [acceptance.n_accepted(one, MAX_DRAFT) for one in sequences], "it is reproducible"


def test_an_end_token_in_a_draft_does_not_end_a_response_too_early() -> None:
    acceptance = FixedAcceptance(3, [END])
    one = Sequence(0, [1, 2, END], 20, 4, SamplingParams(), output=[5, 6])
    assert acceptance.completed(one, [END, 9, END], 7) == [6, 9, END, 6, 1, 2, 6]
    one.ignore_end = True
    assert acceptance.completed(one, [END, 9, END], 4) == [END, 9, END, END]


# --- the torch core ---


@pytest.mark.parametrize("kind", ["NGram", "Draft_Target"])
def test_the_torch_core(folder: Path, draft_folder: Path, repetitive: Tokens, kind: str) -> None:
    config = NGRAM if kind == "NGram" else draft_target(draft_folder)
    core = make_core(folder, speculative_config=config, acceptance_length=2.5)
    n_output = 40
    answers = answer(core, make_batch(repetitive, max_output=n_output, min_output=n_output))
    assert all(len(tokens) == n_output for tokens in answers)
    counts = core.statistics()
    assert 1 + counts["accepted_tokens"] / counts["verifications"] == pytest.approx(2.5, abs=0.25)
    assert counts["accepted_at_0"] > counts["accepted_at_1"] > counts["accepted_at_2"] == 0
    alone = make_core(folder, speculative_config=config, acceptance_length=2.5)
    first = make_batch(repetitive[:1], max_output=n_output, min_output=n_output)
    assert answer(alone, first)[0] == answers[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "--acceptance_length 2.5: there are no draft tokens to accept; set --speculative_config"),
        ({"speculative_config": {"decoding_type": "NGram", "max_draft_len": 1}}, "at most 2 tokens"),
    ],
)
def test_lengths_that_no_step_can_have(folder: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TorchCore.check(CoreConfig("torch", engine_config(folder, acceptance_length=2.5, **options)))


def test_a_context_instance_needs_no_draft_tokens(folder: Path) -> None:
    TorchCore.check(CoreConfig("torch", engine_config(folder, acceptance_length=2.5, role="context")))
