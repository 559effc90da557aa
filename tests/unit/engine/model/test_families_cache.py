"""Windows, sinks and latents over a KV cache in another type: an answer does not depend on chunks."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpillm.engine.schedule.block_allocator import BlockAllocator
from mpillm.engine.schedule.sampling_params import SamplingParams
from mpillm.engine.schedule.scheduler import Scheduler
from mpillm.engine.schedule.sequence import Sequence
from mpillm.engine.shape.engine_config import SchedulerConfig
from mpillm.engine.shape.read_config import load_model_config
from tests.helpers.families import make_family
from tests.helpers.gpu_steps_on_cpu import GpuCore
from tests.helpers.torch_cores import answer, make_batch, make_core

pytest.importorskip("transformers")

PROMPTS = [[3 + (7 * i + 5 * j * j) % 300 for j in range(3 + 7 * i)] for i in range(8)]
FAMILIES = ["MistralForCausalLM", "GptOssForCausalLM", "Gemma3ForCausalLM", "DeepseekV3ForCausalLM"]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.long
def test_a_cache_in_fp8(tmp_path: Path, name: str) -> None:
    make_family(name, tmp_path)
    of = {"dtype": "float32", "kv_cache_dtype": "fp8"}
    whole = answer(make_core(tmp_path, **of), make_batch(PROMPTS))
    chunked = answer(make_core(tmp_path, **of, max_num_tokens=7, max_batch_size=3), make_batch(PROMPTS))
    assert whole == chunked
    exact = answer(make_core(tmp_path, dtype="float32"), make_batch(PROMPTS))
    assert sum(a[:1] == b[:1] for a, b in zip(whole, exact, strict=True)) >= len(PROMPTS) - 2


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.long
def test_bfloat16(tmp_path: Path, name: str) -> None:
    """Most first tokens are those of float32."""
    make_family(name, tmp_path)
    found, wanted = (
        answer(make_core(tmp_path, dtype=dtype), make_batch(PROMPTS)) for dtype in ("bfloat16", "float32")
    )
    assert sum(a[:1] == b[:1] for a, b in zip(found, wanted, strict=True)) >= len(PROMPTS) - 2


@pytest.mark.parametrize("options", [{}, {"max_num_tokens": 7, "max_batch_size": 3}], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.long
def test_steps_of_gpus(tmp_path: Path, name: str, options: dict[str, int]) -> None:
    """With plain kernels they give the answers of a CPU's steps."""
    make_family(name, tmp_path)
    wanted = answer(make_core(tmp_path, dtype="float32"), make_batch(PROMPTS))
    core = make_core(tmp_path, kind=GpuCore, dtype="float32", gpu_bytes=8 << 30, **options)
    assert answer(core, make_batch(PROMPTS)) == wanted


@pytest.mark.parametrize("policy", ["max_util", "no_evict"])
@pytest.mark.parametrize("reuse", [False, True])
def test_blocks_outside_all_windows_are_given_back(tmp_path: Path, policy: str, reuse: bool) -> None:
    """Answers that a cache has room for only without what no window reaches are those of a large one."""
    make_family("MistralForCausalLM", tmp_path)  # its window has 12 tokens
    options = {"dtype": "float32", "batch_scheduler_policy": policy, "enable_kv_cache_reuse": reuse}
    prompts, n_new = [prompt[:9] for prompt in PROMPTS], 60
    found = []
    for n_tokens in (8 * 40, 1024):  # each sequence holds up to 32 tokens at once, of 69
        core = make_core(tmp_path, **options, kv_cache_tokens=n_tokens, max_seq_len=96)
        found.append(answer(core, make_batch(prompts, max_output=n_new)))
        scheduler, blocks = core.engine.scheduler, core.engine.blocks
        assert scheduler.preemptions == 0 and scheduler._n_promised == 0
        assert blocks.n_free == blocks.n_blocks
    assert found[0] == found[1] and all(len(tokens) == n_new for tokens in found[0])


def test_where_blocks_are_given_back(tmp_path: Path) -> None:
    """Not where some layers see all tokens, of which each block has a part."""
    for name, window in (("MistralForCausalLM", 12), ("GptOssForCausalLM", 0), ("LlamaForCausalLM", 0)):
        make_family(name, tmp_path / name)
        assert load_model_config(str(tmp_path / name)).widest_window == window


def test_what_a_scheduler_takes_back() -> None:
    """Whole blocks that no later token sees, once; none of a sequence that hands its cache over."""
    scheduler = Scheduler(
        SchedulerConfig(4, 64, 4, enable_chunked_context=True), BlockAllocator(20), window=8
    )
    grows, kept = (
        Sequence(i, [1] * 21, 12, 0, SamplingParams(), hands_off=hands_over)
        for i, hands_over in enumerate((False, True))
    )
    scheduler.add(kept)
    scheduler.commit(scheduler.plan())
    kept.output.append(1)
    scheduler.drop(kept)
    scheduler.add(grows)
    scheduler.commit(scheduler.plan())
    for n_cached in range(21, 32):
        grows.output.append(1)
        scheduler.commit(scheduler.plan())
        assert grows.n_blocks_freed == (n_cached + 1 - 8) // 4 and not any(
            grows.blocks[: grows.n_blocks_freed]
        )
        assert all(grows.blocks[grows.n_blocks_freed :]) and grows.n_cached == n_cached + 1
        assert len(grows.blocks) - grows.n_blocks_freed <= grows.max_blocks
    assert all(kept.blocks) and len(kept.blocks) == 6
    scheduler.free(kept)
    scheduler.remove(grows)
    assert scheduler._n_promised == 0 and scheduler._blocks.n_free == 20
