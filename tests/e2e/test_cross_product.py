"""Every pair of layouts with every scheduler policy, chunking and reuse: an hour and a half on two cores
(`make test-cross`)."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.helpers.support import Starter

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.helpers.layouts import (
    ALIKE_TOKENS,
    CHUNKINGS,
    HANDOFF_SIZES,
    SCARCE,
    Answers,
    check_handoff,
    prompts_alike,
    sections,
)

POLICIES = ("max_util", "no_evict", "static")


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return prompts_alike(tmp_path_factory.mktemp("alike"), 64)


@pytest.mark.cross
@pytest.mark.parametrize(("context", "generation"), list(itertools.product(HANDOFF_SIZES, HANDOFF_SIZES)))
def test_a_pair(one: Starter, alike: Answers, context: str, generation: str) -> None:
    """64 prompts, some of which begin alike, get the tokens of transformers, with a small cache and once for
    each policy with a large one."""
    ranks = sum(tp * pp for tp, pp, _ in (HANDOFF_SIZES[context], HANDOFF_SIZES[generation]))
    n_evicted = n_reused = 0

    def run(name: str, *options: object) -> None:
        nonlocal n_evicted, n_reused
        file: Path = sections(one.folder / f"{name}.yaml", HANDOFF_SIZES[context], HANDOFF_SIZES[generation])
        instances = check_handoff(
            one, "tiny-llama", alike, file, ranks, *options, n_new=ALIKE_TOKENS, timeout=600
        )
        evicted = sum(instance["preemptions"] for instance in instances)
        assert "max_util" in name or evicted == 0
        n_evicted += evicted
        n_reused += sum(instance.get("reused_blocks", 0) for instance in instances)

    for policy in POLICIES:
        for chunking, reuse in itertools.product(CHUNKINGS, (False, True)):
            options = [
                "--batch_scheduler_policy",
                policy,
                "--enable_kv_cache_reuse",
                str(reuse).lower(),
                *CHUNKINGS[chunking],
            ]
            run(f"{policy}-{chunking}{'-reuse' * reuse}".replace(" ", "-"), *options, *SCARCE)
        run(f"{policy}-roomy", "--batch_scheduler_policy", policy)
    assert n_evicted > 0
    assert n_reused > 0
