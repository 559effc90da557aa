"""Greedy tokens equal those of transformers whatever the scheduler's policy, the chunking and the block
reuse, also on several ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.layouts import ALIKE_TOKENS, CHUNKINGS, SCARCE, prompts_alike
from tests.helpers.support import DONE, ROOT, USAGE, Starter

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import disagg  # noqa: E402
from tests.helpers.layouts import Answers, layout  # noqa: E402


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return prompts_alike(tmp_path_factory.mktemp("alike"), 16)


def check(
    starter: Starter, answers: Answers, tp: int, pp: int, *options: object, name: str = "run"
) -> dict[str, Any]:
    """Check that one instance's answers are the expected ones; return what it counted."""
    dataset, expected = answers
    given = [
        "--model_path",
        "tiny-llama",
        "--dataset_path",
        dataset,
        "--save_outputs",
        "--num_threads",
        1,
        *layout(tp, pp),
        *options,
    ]
    ended = starter.run(
        tp * pp + 1,
        *(*given, "--max_output_len", ALIKE_TOKENS, "--min_query_count", len(expected)),
        core="tests.helpers.plugin_torch_cores:Greedy",
        env={"PYTHONPATH": str(ROOT)},
        log_dir=starter.folder / name,
        timeout=600,
    ).must(DONE)
    found = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    wrong = [index for index, tokens in enumerate(expected) if found.get(index) != tokens]
    assert not wrong, (
        f"prompt {wrong[0]}: {found.get(wrong[0])}, transformers: {expected[wrong[0]]} ({len(wrong)}"
        " prompts differ)"
    )
    (instance,) = ended.result["per_instance"]
    return dict(instance)


def see(instance: dict[str, Any], policy: str, reuse: bool) -> None:
    """Check what the statistics must say of a run with a small cache."""
    assert (instance["preemptions"] > 0) == (policy == "max_util")
    assert ("reused_tokens" in instance) == reuse
    assert not reuse or instance["reused_tokens"] == 32 * instance["reused_blocks"] > 0


@pytest.mark.parametrize(
    ("tp", "pp", "policy", "chunking", "reuse"),
    [
        (2, 1, "max_util", "evenly", True),
        pytest.param(1, 2, "max_util", "in order", True, marks=pytest.mark.slow),
        (1, 2, "static", "unchunked", True),
    ],
)
def test_policies_on_several_ranks(
    one: Starter, alike: Answers, tp: int, pp: int, policy: str, chunking: str, reuse: bool
) -> None:
    options = [
        "--batch_scheduler_policy",
        policy,
        "--enable_kv_cache_reuse",
        str(reuse).lower(),
        *CHUNKINGS[chunking],
        *SCARCE,
    ]
    see(check(one, alike, tp, pp, *options), policy, reuse)


def test_a_yaml_sets_all_options(one: Starter, alike: Answers) -> None:
    """A YAML has all options under TensorRT-LLM's names, and the run directory's YAML those of the run.

    Stop words end an answer, and reuse is not for submissions.
    """
    dataset, expected = alike
    yaml = one.folder / "disagg.yaml"
    yaml.write_text(
        "model: tiny-llama\nexecutors:\n  kv_cache_config: {enable_block_reuse: true, max_tokens: 320,"
        " tokens_per_block: 32}\n"
        "  scheduler_config: {capacity_scheduler_policy: GUARANTEED_NO_EVICT, context_chunking_policy:"
        " EQUAL_PROGRESS}\n"
        "  moe_config: {backend: CUTLASS}\n"
    )
    word = expected[0][6:8]
    options = [
        "--disagg_config",
        yaml,
        "--stop_words",
        json.dumps([word]),
        "--save_outputs",
        "--num_threads",
        1,
    ]
    options += ["--dataset_path", dataset, "--max_output_len", ALIKE_TOKENS, "--max_seq_len", 200]
    ended = one.run(2, *options, "--min_query_count", 16, core="torch").must(DONE)
    assert "KV cache reuse is on: MLPerf forbids it" in ended.out
    assert "executors: has no effect on the torch core: moe_config\n" in ended.out
    (instance,) = ended.result["per_instance"]
    see(instance, "no_evict", True)
    found = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    assert len(found[0]) <= 8
    for index, tokens in enumerate(expected):
        ends = [n for n in range(1, len(tokens)) if tokens[:n][-2:] == word]
        assert found[index] == tokens[: min(ends, default=len(tokens))]

    assert ended.result["model"] == "tiny-llama"
    ran = disagg.load(str(ended.log_dir / "disagg.yaml"))
    assert ran.model == "tiny-llama" and ran.executors is not None
    assert (
        ran.executors.max_batch_size,
        ran.executors.max_seq_len,
        ran.executors.kv_cache_config["max_tokens"],
    ) == (64, 200, 320)
    contradiction = one.run(
        2, *options, "--model_path", "tiny-mixtral", core="torch", log_dir=one.folder / "other"
    ).must(USAGE)
    assert (
        f"--model_path tiny-mixtral, but {yaml}: model is tiny-llama: leave one of them out"
        in contradiction.message
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--model_path", "tiny-llama", "--beam_width", 2],
            "--beam_width 2: must be 1; only requests to Triton may ask for more",
        ),
        (["--model_path", "llama3.1-405b", "--load_format", "dummy"], "llama3.1-405b does not fit: it needs"),
    ],
    ids=["beams", "too large"],
)
def test_bad_options(one: Starter, options: list[object], message: str) -> None:
    ended = one.run(2, *options, core="torch").must(USAGE)
    assert message in ended.message and "before anything was loaded" in ended.message


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_everything_with_everything(one: Starter, tmp_path: Path, tp: int, pp: int) -> None:
    """Every policy, chunking and reuse answers 64 prompts with 64 new tokens, with a small and a large
    cache."""
    answers = prompts_alike(tmp_path / "model", 64)
    for policy in ("max_util", "no_evict", "static"):
        for chunking, chunks in CHUNKINGS.items():
            for reuse in (False, True):
                options = [
                    "--batch_scheduler_policy",
                    policy,
                    "--enable_kv_cache_reuse",
                    str(reuse).lower(),
                    *chunks,
                ]
                name = f"tp{tp}-pp{pp}-{policy}-{chunking}{'-reuse' * reuse}".replace(" ", "-")
                scarce = check(one, answers, tp, pp, *options, *SCARCE, name=name)
                print(name, scarce, flush=True)
                see(scarce, policy, reuse)
        options = ["--batch_scheduler_policy", policy, "--enable_kv_cache_reuse", *CHUNKINGS["in order"]]
        roomy = check(one, answers, tp, pp, *options, name=f"tp{tp}-pp{pp}-{policy}-roomy")
        # of 61, less those computed side by side
        assert roomy["preemptions"] == 0 and roomy["reused_blocks"] > 50
