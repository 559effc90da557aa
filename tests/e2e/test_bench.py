"""The benchmarks that run on several ranks: they end, whatever happens, and say why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.command import BENCHES
from tests.helpers.make_checkpoint import make_tokenizer
from tests.helpers.presets import save_preset
from tests.helpers.support import Ended, Starter

SMALL = ("--device", "cpu", "--models", "tiny-llama", "--prompt_lens", 64, "--mebibytes", 1, "--repeats", 1)


def on_ranks(one: Starter, ranks: int, *words: object) -> Ended:
    """Run a benchmark on several ranks to its end."""
    return one.plain(ranks, one.python, "-m", "benchmarks", *words).end()


def test_a_handoff_is_measured(one: Starter) -> None:
    ended = on_ranks(one, 2, "handoff", *SMALL).must(0)
    assert "tiny-llama" in ended.out and "all are equal" in ended.out


def test_a_table_of_whole_runs(one: Starter) -> None:
    """Each pair has a line, also one that cannot run, and the exit code says so."""
    small = ("--models", "tiny-llama", "--num_samples", 3, "--max_batch_size", 2, "--max_num_tokens", 64)
    extra = ("--extra", "device:cpu,min_duration:0")
    ended = one.mpillm("bench", "table", *small, "--pairs", "9/4,90000/4", *extra)
    assert ended.code == 1
    assert re.search(
        r"tiny-llama +9/4 +3 +[012] +0 +[\d.]+ +[\d,]+ +- +- +([\d,]+ +[\d.]+|- +-)( +-){5} +VALID", ended.out
    ), ended.out
    assert re.search(r"tiny-llama +90000/4 failed: max_seq_len 90004: tiny-llama allows", ended.out), (
        ended.out
    )
    many = one.mpillm("bench", "table", *small[:2], *small[4:], "--pairs", "9/4,90000/4", *extra)
    assert many.code == 1
    assert re.search(r"tiny-llama +9/4 +6 ", many.out), many.out
    assert "90000/4 failed: max_seq_len 90004: tiny-llama allows 1 to 4096" in many.out, many.out
    assert "expected tokens in/out" in one.mpillm("bench", "table", *small, "--pairs", "9x4").must(2).message


def test_the_engine_beside_itself_with_draft_tokens(one: Starter, tmp_path: Path) -> None:
    save_preset("tiny-llama", tmp_path / "model")
    make_tokenizer(tmp_path / "model")
    model = str(tmp_path / "model")
    program = [one.python, "-m", "benchmarks", "engine", "--model_path", model, "--speculative_config"]
    options = ["--num_prompts", "4", "--output_len", "32", "--repeats", "1"]
    ended = one.command([*program, "decoding_type:NGram,max_draft_len:2", *options]).end().must(0)
    assert "answers equal to engine, with draft tokens: 4 of 4" in ended.out
    assert re.search(r"a decode step, ms, by sequences: 1 \d+\.\d$", ended.out, re.MULTILINE), ended.out
    found = re.search(r"draft tokens of a round: (\d+), of which (\d+) were accepted", ended.out)
    assert found is not None and int(found[1]) >= int(found[2]) > 0, ended.out
    wrong = one.command([*program, "decoding_type:Ngramm", *options]).end().must(2)
    assert "did you mean 'NGram'" in wrong.message


def test_core_models_table_has_whole_latencies_through_mpi(one: Starter) -> None:
    """As over gRPC: mean and percentiles of whole answers, beside those of first tokens."""
    words = ("-i", "mpi", "--ranks", 2, "token_norm_dist", "--input_mean", 16, "--output_mean", 8)
    ended = one.mpillm(
        "bench", "core-model", *words, "--num_requests", 16, "--model_path", "tiny-llama"
    ).must(0)
    assert re.search(r"Avg\. latency \(ms\) +\| +[\d.]+ ", ended.out), ended.out
    assert re.search(
        r"^latency, ms: +mean [\d.]+  P50 [\d.]+  P90 [\d.]+  P99 [\d.]+$", ended.out, re.MULTILINE
    )


def test_a_bench_that_takes_too_long(one: Starter) -> None:
    ended = on_ranks(one, 2, "agreement", "--device", "cpu", "--deadline", 0.1)
    assert ended.code not in (0, 2) and "not done after --deadline 0.1 s" in ended.err


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (3, ("handoff", "--device", "cpu"), "2 ranks are needed, not 3: mpirun -n 2"),
        (2, ("handoff", "--device", "gpu"), "did you mean 'cpu'"),
    ],
)
def test_an_impossible_run_gives_one_message(
    one: Starter, ranks: int, options: tuple[str, ...], message: str
) -> None:
    assert message in on_ranks(one, ranks, *options).must(2).message


def test_what_runs_as_one_process(one: Starter) -> None:
    ended = on_ranks(one, 2, "scale").must(2)
    assert "started 2 processes of 'benchmarks scale', which runs as one: start it once" in ended.message


@pytest.mark.parametrize("words", [(), *((name,) for name in BENCHES)])
def test_each_has_help(one: Starter, words: tuple[str, ...]) -> None:
    assert "usage: " in one.command([one.python, "-m", "benchmarks", *words, "--help"]).end().must(0).out
