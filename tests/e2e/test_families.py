"""Every family of models: greedy tokens equal those of transformers in several layouts, and handed over."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mpillm.engine.shape.families.known import FAMILIES
from tests.helpers.families import make_family, pack_experts
from tests.helpers.int4 import pack_int4
from tests.helpers.layouts import (
    FAMILY_PROMPTS,
    FAMILY_TOKENS,
    GUESSES,
    VARIANTS,
    Answers,
    check,
    layout,
    make_answers,
)
from tests.helpers.serve_command import post, serve
from tests.helpers.support import DONE, Starter

pytest.importorskip("torch")
pytest.importorskip("transformers")

# Those of the presets have tests in `test_parallel` and `test_oracle`.
NAMES = [name for name in FAMILIES if name not in ("LlamaForCausalLM", "MixtralForCausalLM")]


@pytest.fixture(scope="module", params=NAMES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Answers]]:
    """Yield a model's folder, and prompts with transformers' answers."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_family(request.param, folder / "model")
    yield folder / "model", make_answers(model, folder)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, VARIANTS["scarce"], id="chunks and evictions"),
        pytest.param(2, layout(tp=2), id="tp 2", marks=pytest.mark.slow),
        pytest.param(4, [*layout(tp=2, pp=2), *GUESSES], id="tp 2, pp 2, guesses", marks=pytest.mark.slow),
    ],
)
def test_layouts(one: Starter, family: tuple[Path, Answers], ranks: int, options: list[object]) -> None:
    model, answers = family
    assert len({tuple(tokens) for tokens in answers[1]}) > FAMILY_PROMPTS // 2
    check(one, model, ranks, answers, *options, n_new=FAMILY_TOKENS)


def test_a_handoff_between_layouts(one: Starter, family: tuple[Path, Answers]) -> None:
    """From two ranks to one; chunks, and blocks that are reused."""
    model, (dataset, expected) = family
    ended = one.run(
        4,
        *("--mode", "disaggregated", "--ctx_tp_size", 2, "--model_path", model, "--dataset_path", dataset),
        *("--dtype", "float32", "--save_outputs", "--max_output_len", FAMILY_TOKENS, "--num_threads", 1),
        *("--min_query_count", FAMILY_PROMPTS, "--enable_kv_cache_reuse", "true"),
        *("--enable_chunked_context", "true", "--max_num_tokens", 24),
        core="torch",
        timeout=300,
    ).must(DONE)
    found = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    assert [found[index] for index in range(FAMILY_PROMPTS)] == expected


@pytest.mark.slow
def test_behind_serve(one: Starter, family: tuple[Path, Answers]) -> None:
    """All prompts at once, whole and as streams."""
    model, (dataset, expected) = family
    prompts = [json.loads(line)["input_tokens"] for line in dataset.read_text().splitlines()]
    options = {"max_tokens": FAMILY_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    command, host, port = serve(
        one, 2, "--core_type", "torch", "--model_path", model, "--dtype", "float32", "--num_threads", 1
    )

    def ask(case: tuple[list[int], bool]) -> list[int]:
        prompt, stream = case
        with contextlib.closing(
            post(host, port, "/v1/completions", prompt=prompt, stream=stream, **options)
        ) as connection:
            text = connection.getresponse().read().decode()
        parts = [line[6:] for line in text.splitlines() if line.startswith("data: {")] if stream else [text]
        choices = [choice for part in parts for choice in json.loads(part)["choices"]]
        return [token for choice in choices for token in choice["token_ids"]]

    with ThreadPoolExecutor(FAMILY_PROMPTS) as threads:
        found = [[*threads.map(ask, [(prompt, stream) for prompt in prompts])] for stream in (False, True)]
    assert found == [expected, expected]
    command.process.send_signal(signal.SIGTERM)
    command.end(30).must(DONE)


@pytest.mark.slow
def test_an_engine_holds_biases_and_norms(one: Starter, family: tuple[Path, Answers]) -> None:
    from mpillm.engine.build_engine import build

    model, answers = family
    engine = one.folder / "engine"
    build(model, engine, tp_size=2, dtype="float32")
    check(one, model, 2, answers, *layout(tp=2), "--engine_dir", engine, n_new=FAMILY_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if FAMILIES[name].fields.expert_size is not None])
def test_experts_on_their_ranks(one: Starter, tmp_path: Path, name: str) -> None:
    """All on one of two ranks, or each expert on two of four; weights that do not add up to 1, too."""
    more = {"norm_topk_prob": False} if name == "Qwen3MoeForCausalLM" else {}
    answers = make_answers(make_family(name, tmp_path / "model", **more), tmp_path)
    for tp, ep in ((2, 2), (4, 2)):
        check(
            one,
            tmp_path / "model",
            tp,
            answers,
            *(*layout(tp=tp, ep=ep), *VARIANTS["scarce"]),
            n_new=FAMILY_TOKENS,
            name=f"tp{tp}ep{ep}",
        )


def test_experts_in_mxfp4(one: Starter, tmp_path: Path) -> None:
    """Packed experts of four bits: on one rank, halves of each on two, and each on one of two."""
    model = make_family("GptOssForCausalLM", tmp_path / "model", intermediate_size=64)
    pack_experts(model, tmp_path / "model")
    answers = make_answers(model, tmp_path)
    assert len({tuple(tokens) for tokens in answers[1]}) > FAMILY_PROMPTS // 2
    for tp, ep in ((1, 1), (2, 1), (2, 2)):
        more = layout(tp=tp, ep=ep)
        check(one, tmp_path / "model", tp, answers, *more, n_new=FAMILY_TOKENS, name=f"tp{tp}ep{ep}")


@pytest.mark.parametrize(
    ("name", "form"),
    [("LlamaForCausalLM", "awq"), ("Qwen2ForCausalLM", "gptq"), ("Qwen3ForCausalLM", "packed")],
)
def test_weights_in_int4(one: Starter, tmp_path: Path, name: str, form: str) -> None:
    """On one rank, and halves on two; the layers of a Llama are one call where there is a compiler."""
    model = make_family(name, tmp_path / "model", intermediate_size=128)
    pack_int4(model, tmp_path / "model", form, 32)
    answers = make_answers(model, tmp_path)
    assert len({tuple(tokens) for tokens in answers[1]}) > FAMILY_PROMPTS // 2
    for tp in (1, 2):
        check(one, tmp_path / "model", tp, answers, *layout(tp=tp), n_new=FAMILY_TOKENS, name=f"tp{tp}")
