"""What ``benchmarks decode`` prints, with a GPU's way of running steps, on a CPU."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest

from benchmarks import decode as module
from benchmarks import decode_parts
from benchmarks.decode import Options
from benchmarks.decode_parts import Rate, Rates
from mpillm.cores.base import CoreConfig
from mpillm.cores.torch_core import TorchCore
from mpillm.engine.shape.engine_config import EngineConfig
from mpillm.engine.shape.model_info import ModelInfo
from mpillm.options.command_line import Parser
from mpillm.options.values import collect
from tests.helpers import plain_kernels
from tests.helpers.gpu_steps_on_cpu import gpu_worker

RATE = Rate(1e12, 0.9e12, 690.0, 1500.0)


@pytest.mark.long
@pytest.mark.parametrize("guesses", [0, 2])
def test_a_line_for_each_batch_piece_and_guess(
    guesses: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(TorchCore, "gpus", lambda: (SimpleNamespace(name="a GPU", free=8 << 30),))
    monkeypatch.setattr(decode_parts, "measure_rates", lambda *_: Rates(RATE, RATE, RATE, RATE, 1e-3, 120.0))
    monkeypatch.setattr(decode_parts, "seconds_of", lambda _: 1e-4)
    monkeypatch.setitem(sys.modules, "mpillm.engine.kernels.step_kernels", plain_kernels)
    engines: list[EngineConfig] = []

    def worker(config: EngineConfig, info: ModelInfo) -> object:
        engines.append(config)
        assert info.max_seq_len == config.max_seq_len
        return gpu_worker(TorchCore(CoreConfig("torch", config)))

    monkeypatch.setattr(module, "_worker", worker)
    words = ["--model_path", "tiny-llama", "--batches", "1,3", "--context_len", "40"]
    words += ["--output_len", "4", "--pieces", "8,16", "--dtype", "float32"]
    if guesses:
        words += ["--speculative_config", f"decoding_type:NGram,max_draft_len:{guesses}"]
    assert module.main(collect(words, Options, Parser(prog="benchmarks decode"))) == 0
    out = capsys.readouterr().out
    assert engines[0].scheduler.max_batch_size == 3
    number = r" +[-\d.]+"
    assert len(re.findall(rf"^ +[13]{number * 6}$", out, re.MULTILINE)) == 2
    assert len(re.findall(rf"^ +[13] +(?:8|16){number * 2}$", out, re.MULTILINE)) == 4
    assert len(re.findall(rf"^ +[13] +[12]{number * 3}$", out, re.MULTILINE)) == 2 * guesses
    assert out.count("for seconds on end") == 4 and "energy: 120 W always" in out
