"""What ``benchmarks decode`` prints, with a GPU's way of running steps, on a CPU."""

from __future__ import annotations

import re

import pytest

from benchmarks.decode import Options, engine_config, print_steps
from benchmarks.decode_parts import CudaGraphs, Rate, Rates
from mpillm.cores.base import CoreConfig
from mpillm.cores.torch_core import TorchCore
from mpillm.options.command_line import Parser
from mpillm.options.values import collect
from tests.helpers import plain_kernels
from tests.helpers.gpu_steps_on_cpu import gpu_worker

RATE = Rate(1e12, 0.9e12, 690.0, 1500.0)
RATES = Rates(RATE, RATE, RATE, RATE, 1e-3, 120.0)


class ConstantTimes(CudaGraphs):
    """A CPU has no graphs."""

    def seconds_of(self, work: object) -> float:
        return 1e-4


@pytest.mark.long
@pytest.mark.parametrize("guesses", [0, 2])
def test_a_line_for_each_batch_piece_and_guess(guesses: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model_path", "tiny-llama", "--batches", "1,3", "--context_len", "40"]
    words += ["--output_len", "4", "--pieces", "8,16", "--dtype", "float32"]
    if guesses:
        words += ["--speculative_config", f"decoding_type:NGram,max_draft_len:{guesses}"]
    config = collect(words, Options, Parser(prog="benchmarks decode"))
    engine = engine_config(config, 8 << 30)
    assert engine.scheduler.max_batch_size == 3
    worker = gpu_worker(TorchCore(CoreConfig("torch", engine)))
    assert worker.part.info.max_seq_len == engine.max_seq_len
    print_steps(config, engine, worker, plain_kernels, RATES, ConstantTimes())
    out = capsys.readouterr().out
    number = r" +[-\d.]+"
    assert len(re.findall(rf"^ +[13]{number * 6}$", out, re.MULTILINE)) == 2
    assert len(re.findall(rf"^ +[13] +(?:8|16){number * 2}$", out, re.MULTILINE)) == 4
    assert len(re.findall(rf"^ +[13] +[12]{number * 3}$", out, re.MULTILINE)) == 2 * guesses
    assert out.count("for seconds on end") == 4 and "energy: 120 W always" in out
