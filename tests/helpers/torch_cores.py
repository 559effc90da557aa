"""Torch cores for tests: requests for them, and what they answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mpillm.comms.messages import NO_INSTANCE, REQUEST, Batch, ResponseFlag
from mpillm.comms.mover import Peer
from mpillm.cores.base import CoreConfig
from mpillm.cores.torch_core import TorchCore
from mpillm.engine.extras.request_extras import RequestExtras
from tests.helpers.engine_configs import engine_config
from tests.helpers.loopback import Wire
from tests.helpers.oracle import Tokens

N_OUTPUT = 24


def make_core(model: Path | str, connect: Any = None, kind: Any = TorchCore, **options: Any) -> TorchCore:
    defaults: dict[str, Any] = {
        "tokens_per_block": 8,
        "n_threads": 1,
        "end_ids": (),
        "max_seq_len": 256,
        "enable_chunked_context": True,
    }
    core: TorchCore = kind(CoreConfig("torch", engine_config(model, **defaults | options)))
    if connect is not None:
        core.connect(*connect)
    core.load()
    return core


def make_batch(prompts: Tokens, **fields: Any) -> Batch:
    rows = np.zeros(len(prompts), REQUEST)
    rows["id"] = np.arange(len(prompts))
    rows["n_tokens"] = [len(p) for p in prompts]
    rows["max_output"] = N_OUTPUT
    rows["top_p"] = 1
    rows["generation"] = NO_INSTANCE
    for name, value in fields.items():
        rows[name] = value
    return Batch(rows, np.array([t for p in prompts for t in p], np.int32))


class Answers:
    """Collects response rows and checks the contract: one FIRST and one FINAL for each id, in that order, or
    both at once."""

    def __init__(self) -> None:
        self.first: dict[int, int] = {}
        self.final: dict[int, list[int]] = {}
        self.partial: dict[int, list[int]] = {}  # what streamed, behind the first token
        self.errors: list[int] = []
        self.cancelled: list[int] = []

    def poll(self, core: TorchCore) -> None:
        batch = core.poll_responses()
        if batch is None:
            return
        assert len(batch)
        offsets = batch.offsets()
        assert offsets[-1] == len(batch.tokens)
        for i, row in enumerate(batch.rows):
            id_, flags, tokens = (
                int(row["id"]),
                int(row["flags"]),
                batch.tokens[offsets[i] : offsets[i + 1]].tolist(),
            )
            assert id_ not in self.final
            if flags & ResponseFlag.ERROR:
                assert flags & ResponseFlag.FINAL and not tokens
                self.errors.append(id_)
                continue
            if flags & ResponseFlag.CANCELLED:
                assert flags & ResponseFlag.FINAL and not tokens
                self.cancelled.append(id_)
                continue
            if flags & ResponseFlag.PARTIAL:
                assert tokens and flags == ResponseFlag.PARTIAL
                self.partial.setdefault(id_, []).extend(tokens)
            if flags & ResponseFlag.FIRST:
                assert id_ not in self.first
                self.first[id_] = tokens[0]
                assert len(tokens) == 1 or flags & ResponseFlag.FINAL
            if flags & ResponseFlag.FINAL:
                assert id_ not in self.first or tokens[0] == self.first[id_]
                assert tokens[1 : 1 + len(self.partial.get(id_, ()))] == self.partial.get(id_, [])
                self.final[id_] = tokens

    def run(self, core: TorchCore) -> Answers:
        while core.has_work():
            self.poll(core)
        return self

    def tokens(self) -> Tokens:
        return [self.final[id_] for id_ in sorted(self.final)]


def answer(core: TorchCore, batch: Batch) -> Tokens:
    core.enqueue(batch)
    answers = Answers().run(core)
    assert not answers.errors
    assert set(answers.first) == set(answers.final)
    assert core.engine.blocks.n_free == core.engine.blocks.n_blocks
    return answers.tokens()


def answer_with_extras(
    core: TorchCore, prompts: Tokens, extras_by_id: dict[int, RequestExtras], max_output: int, **fields: Any
) -> Tokens:
    """Return the answers to prompts, some of which ask for what plain requests can't."""
    core.enqueue_with_extras(make_batch(prompts, max_output=max_output, **fields), extras_by_id)
    whole: dict[int, list[int]] = {}
    while len(whole) < len(prompts):
        for row in (core.poll_responses() or make_batch([])).split():
            if row.rows["flags"][0] & ResponseFlag.FINAL:
                whole[int(row.rows["id"][0])] = row.tokens.tolist()
    return [whole[i] for i in range(len(prompts))]


def make_pair(
    model: Path, context: dict[str, Any] | None = None, generation: dict[str, Any] | None = None
) -> tuple[TorchCore, TorchCore]:
    """Return a context and a generation core, instances 0 and 1, that can hand over; options of each."""
    wire = Wire()
    return (
        make_core(model, connect=(wire.mover(0), {1: Peer(1, 1, 1)}), role="context", **context or {}),
        make_core(model, connect=(wire.mover(1), {0: Peer(0, 1, 1)}), role="generation", **generation or {}),
    )


def hands_off(
    context: TorchCore, generation: TorchCore, batch: Batch, streamed: dict[int, list[int]] | None = None
) -> Tokens:
    """Run contexts on one core, generation on the other, as the roles do: offers in order.

    Returns the answers by id.
    """
    requests = {int(request.rows["id"][0]): request for request in batch.split()}
    context.enqueue(batch)
    firsts, finals = Answers(), Answers()
    offered: list[int] = []
    arrived: set[int] = set()
    left: set[int] = set()
    for _ in range(20_000):
        if len(firsts.final | finals.final) == len(requests) and not context.engine.handoffs._outgoing:
            break
        offered += context.started()
        while offered and generation.receive_kv(requests[offered[0]], 0, slot=offered[0]):
            context.send_kv(offered[0], 1, slot=offered[0])
            offered.pop(0)
        if context.has_work():
            firsts.poll(context)
        left |= set(context.poll_kv())
        arrived |= set(generation.poll_kv())
        for id_ in sorted(arrived & left & set(firsts.first)):
            context.release_kv(id_)
            if id_ in firsts.final:
                generation.release_kv(id_)
            else:
                generation.admit(requests[id_], firsts.first[id_])
            arrived.remove(id_)
        if generation.has_work():
            finals.poll(generation)
    assert not finals.first and not firsts.partial
    if streamed is not None:
        streamed |= finals.partial
    for core in (context, generation):
        assert core.engine.blocks.n_free == core.engine.blocks.n_blocks
        assert not core.has_work()
    done = firsts.final | finals.final
    return [done[id_] for id_ in sorted(done)]
