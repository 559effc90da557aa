"""The extras of a step on other ranks are those of the root rank."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mpillm.engine.extras.lora import MODULES, Adapter
from mpillm.engine.extras.step_extras import ReceivedAdapters, SharedAdapters, StepExtras
from mpillm.engine.schedule.step import Step
from mpillm.engine.shape.layout import RankLayout
from mpillm.engine.shape.read_config import load_model_config

MODEL = load_model_config("tiny-llama")
LAYOUT = RankLayout(tp_size=2)


def make_adapter(value: float) -> Adapter:
    """Its weights have less precision than in a message."""
    weights = np.full((1, 2 * MODEL.hidden_size), value, np.float16)
    return Adapter(weights, np.array([[MODULES["attn_q"], 0, 1]], np.int32), MODEL, torch.float32, LAYOUT)


def adjust(logits: Tensor) -> None:
    logits.zero_()


def test_other_ranks_get_neither_functions_nor_lists() -> None:
    sent = StepExtras([(17, 4), (9, 2)], [([], slice(2, 6))], [(0, adjust), (5, adjust)])
    received = ReceivedAdapters(MODEL, torch.float32, LAYOUT).read(bytes(sent))
    assert received == StepExtras([(17, 4), (9, 2)], [(None, slice(2, 6))], [(0, None), (5, None)])


def test_adapters_travel_once_and_are_freed() -> None:
    shared, received = SharedAdapters(), ReceivedAdapters(MODEL, torch.float32, LAYOUT)
    adapters = [make_adapter(0.5), make_adapter(0.25)]
    for n_new in (2, 0):
        step = Step()
        StepExtras.of(step).adapters = [(adapters[0], slice(0, 2)), (adapters[1], slice(2, 3))]
        shared.complete(step)
        assert len(StepExtras.of(step).new_adapters) == n_new
        for (sent, rows), (got, its_rows) in zip(
            StepExtras.of(step).adapters, received.read(bytes(StepExtras.of(step))).adapters, strict=True
        ):
            assert rows == its_rows
            for ours, theirs in zip(sent.product(0, "qkv") or (), got.product(0, "qkv") or (), strict=True):
                assert torch.equal(ours, theirs) and ours.numel()
    assert len(received) == 2
    del step, sent, adapters[1]
    shared.complete(step := Step())
    received.read(bytes(StepExtras.of(step)))
    assert len(received) == 1
    shared.complete(step := Step())
    assert step.extras is None


def test_a_plain_step_has_no_extras() -> None:
    SharedAdapters().complete(step := Step())
    assert step.extras is None
