"""Optional features of requests (`engine.extras.request_extras`) on one GPU: the checks of tests/unit/engine.

Logits of every family, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from mpillm.engine.extras.request_extras import RequestExtras
from mpillm.engine.shape.families.known import FAMILIES
from mpillm.engine.shape.memory import BYTES_TO_CHOOSE, CHOSEN_AT_ONCE
from tests.helpers.extras_checks import (
    BEAM_PROMPTS,
    ON_GPU,
    check_bad_words_and_repetition,
    check_beams_beside_others,
    check_beams_that_end,
    check_family_logits,
    check_logits,
    check_presence_frequency_bias_and_minimum,
)
from tests.helpers.families import make_family
from tests.helpers.gpu_cores import random_prompts
from tests.helpers.oracle import Oracle
from tests.helpers.presets import save_preset
from tests.helpers.torch_cores import answer_with_extras, make_core

SCARCE: dict[str, Any] = {"max_seq_len": 56, "kv_cache_tokens": 56, "max_batch_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    save_preset("tiny-llama", path)
    return path


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.mark.parametrize("near", [False, True], ids=["one cache", "window blocks"])
@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_families(tmp_path: Path, name: str, chunked: bool, near: bool) -> None:
    """Near blocks: those of layers with a window, in families that have some."""
    options = {"max_batch_size": 3, "kv_cache_tokens": 2048} if near else {"kv_cache_tokens": 256}
    if chunked:
        options["max_num_tokens"] = 16
    worst = check_family_logits(name, tmp_path, **ON_GPU, **options)
    print(f"{name}, chunked {chunked}, near {near}: logits differ by at most {worst:.1e} of their norm")


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_tokens": 16}, {"enable_kv_cache_reuse": True}, SCARCE],
    ids=["plain", "chunked", "reuse", "evicted"],
)
def test_logits(options: dict[str, Any], folder: Path, oracle: Oracle) -> None:
    check_logits(folder, oracle, **ON_GPU, **options)


def test_penalties_and_what_is_forbidden(folder: Path, oracle: Oracle) -> None:
    check_bad_words_and_repetition(folder, oracle, **ON_GPU)
    check_presence_frequency_bias_and_minimum(folder, oracle, **ON_GPU)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_tokens": 16, "enable_kv_cache_reuse": True},
        {"max_seq_len": 80, "kv_cache_tokens": 280, "max_batch_size": 12},
    ],
    ids=["plain", "chunked, reuse", "evicting"],
)
def test_beams_beside_others(options: dict[str, Any], folder: Path, oracle: Oracle) -> None:
    check_beams_beside_others(folder, oracle, ON_GPU, **options)


def test_beams_that_end(folder: Path, oracle: Oracle) -> None:
    check_beams_that_end(folder, oracle, early=False, penalty=1.0, **ON_GPU)


def test_blocks_in_fp8_are_copied(folder: Path) -> None:
    """As beams need it, which then find much the same."""
    found = []
    for _ in range(2):
        extras = RequestExtras(beam_width=4, ends=())
        core = make_core(folder, **ON_GPU, kv_cache_dtype="fp8")
        answer_with_extras(core, [BEAM_PROMPTS[1]], {0: extras}, 20)
        assert extras.beams is not None
        found.append([beam.tokens for beam in extras.beams.answers()])
    assert found[0] == found[1] and len(found[0]) == 4


def test_more_rows_than_are_chosen_at_once(folder: Path, oracle: Oracle) -> None:
    """Beside greedy requests, of which none is another's."""
    n = CHOSEN_AT_ONCE + 20
    prompts = random_prompts(np.random.default_rng(5).integers(1, 30, n).tolist())
    extras_by_id = {
        i: RequestExtras(repetition_penalty=1.7, keeps_generation_logits=i == 3) for i in range(0, n, 3)
    }
    core = make_core(folder, **ON_GPU, max_batch_size=n)
    found = answer_with_extras(core, prompts, extras_by_id, 9)
    for i, prompt in enumerate(prompts[:12]):
        penalty = {} if i % 3 else {"repetition_penalty": 1.7}
        assert found[i] == oracle.tokens(prompt, 9, **penalty)
    plain = answer_with_extras(make_core(folder, **ON_GPU), prompts, {}, 9)
    assert sum(a == b for i, (a, b) in enumerate(zip(found, plain, strict=True)) if i % 3) >= n * 2 // 3 - 1


def test_beams_where_layers_have_a_cache_of_their_own(tmp_path: Path) -> None:
    make_family("GptOssForCausalLM", tmp_path)
    core = make_core(tmp_path, **ON_GPU, max_batch_size=3, kv_cache_tokens=2048)
    extras = RequestExtras(beam_width=2, ends=())
    answer_with_extras(core, [[3, 4, 5]], {0: extras}, 9)
    assert extras.error.startswith("beam_width 2: not on a GPU where layers with a window")


def test_choosing_takes_no_more_memory_than_is_kept() -> None:
    """A step of as many rows as are chosen at once, each with all there is; then one of a long prompt."""
    n = CHOSEN_AT_ONCE
    core = make_core("llama3.2-1b", gpu_bytes=20 << 30, gpu=0, load_format="dummy", max_batch_size=n)
    vocab, bias = core.info.vocab_size, np.ones(core.info.vocab_size, np.float32)
    for prompts in ([[5, 6, 7]] * n, [[*range(200)]]):
        extras_by_id = {
            i: RequestExtras(bias, 1.7, 0.5, 0.5, ((8,),), keeps_context_logits=len(prompts) == 1)
            for i in range(len(prompts))
        }
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        answer_with_extras(core, prompts, extras_by_id, 3, temperature=0.7, top_p=0.9)
        taken = (torch.cuda.max_memory_allocated() - before) / (n * vocab)
        print(f"{len(prompts)} prompts: {taken:.1f} bytes a number")
        assert taken <= BYTES_TO_CHOOSE
