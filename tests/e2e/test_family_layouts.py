"""Every family in every layout, on CPUs and GPUs: greedy tokens equal those of transformers in float32.

The layouts are those of test_oracle, test_parallel and test_handoff_layouts. Each family meets each of them,
and each variant, on each device (`slow`); `cross` has every variant in every layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from mpillm.engine.shape.families.known import FAMILIES  # noqa: E402
from mpillm.engine.shape.read_config import load_model_config  # noqa: E402
from tests.helpers.families import make_family  # noqa: E402
from tests.helpers.layouts import (  # noqa: E402  # noqa: E402
    FAMILY_PROMPTS,
    FAMILY_TOKENS,
    GUESSES,
    Answers,
    layout,
    make_answers,
    sections,
)
from tests.helpers.support import CHUNKED, DONE, Starter  # noqa: E402

N_GPUS = torch.cuda.device_count()
ONE = (1, 1, 1)


class Place(NamedTuple):
    """Instances and their TP, PP and EP; with two parts contexts are computed in the first."""

    parts: tuple[tuple[int, tuple[int, int, int]], ...]

    @property
    def n_ranks(self) -> int:
        return sum(n * tp * pp for n, (tp, pp, _) in self.parts)

    @property
    def has_experts(self) -> bool:
        return any(ep > 1 for _, (_, _, ep) in self.parts)


LAYOUTS: dict[str, Place] = {
    "one": Place(((1, ONE),)),
    "two instances": Place(((2, ONE),)),
    "tp2": Place(((1, (2, 1, 1)),)),
    "tp4": Place(((1, (4, 1, 1)),)),
    "pp2": Place(((1, (1, 2, 1)),)),
    "pp3": Place(((1, (1, 3, 1)),)),
    "tp2 pp2": Place(((1, (2, 2, 1)),)),
    "tp2 ep2": Place(((1, (2, 1, 2)),)),
    "tp4 ep2": Place(((1, (4, 1, 2)),)),
    "tp2 pp2 ep2": Place(((1, (2, 2, 2)),)),
    "one to one": Place(((1, ONE), (1, ONE))),
    "two to two": Place(((2, ONE), (2, ONE))),
    "tp2 to one": Place(((1, (2, 1, 1)), (1, ONE))),
    "one to tp2": Place(((1, ONE), (1, (2, 1, 1)))),
    "pp2 to one": Place(((1, (1, 2, 1)), (1, ONE))),
    "one to pp2": Place(((1, ONE), (1, (1, 2, 1)))),
    "tp2 to pp2": Place(((1, (2, 1, 1)), (1, (1, 2, 1)))),
    "tp2 ep2 to tp2": Place(((1, (2, 1, 2)), (1, (2, 1, 1)))),
}
ROOMY: list[object] = ["--kv_cache_tokens", 2048, "--max_seq_len", 120, "--tokens_per_block", 8]
REUSE: list[object] = ["--enable_kv_cache_reuse", "true"]
VARIANTS: dict[str, list[object]] = {
    "default": ROOMY,
    # On GPUs layers with a window then have blocks of their own.
    "small batch, reuse": [*ROOMY, *REUSE, "--max_batch_size", 3, *CHUNKED, "--max_num_tokens", 24],
    "small chunks, guesses": [*ROOMY, *GUESSES, *CHUNKED, "--max_num_tokens", 16],
    "evictions": [
        *("--max_batch_size", 16, "--kv_cache_tokens", 208, "--tokens_per_block", 16),
        *("--max_seq_len", 200, *CHUNKED, "--max_num_tokens", 24),
    ],
}


def cases() -> Iterator[Any]:
    """Yield each family with each device, layout and variant."""
    for f, name in enumerate(FAMILIES):
        for d, device in enumerate(("cpu", "cuda")):
            for p, place in enumerate(LAYOUTS):
                if LAYOUTS[place].has_experts and FAMILIES[name].fields.expert_size is None:
                    continue
                for v, variant in enumerate(VARIANTS):
                    marks = [pytest.mark.cross if (f + d + p + v) % len(VARIANTS) else pytest.mark.slow]
                    if device == "cuda" and LAYOUTS[place].n_ranks > N_GPUS:
                        marks.append(pytest.mark.skip(f"needs {LAYOUTS[place].n_ranks} GPUs"))
                    yield pytest.param(
                        name, device, place, variant, marks=marks, id=f"{name}-{device}-{place}-{variant}"
                    )


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answers]:
    """Return a model's folder, and prompts with transformers' answers."""
    folder = tmp_path_factory.mktemp(request.param)
    answers = make_answers(make_family(request.param, folder / "model"), folder)
    assert len({tuple(tokens) for tokens in answers[1]}) > FAMILY_PROMPTS // 2
    return folder / "model", answers


@pytest.mark.parametrize(("family", "device", "place", "variant"), [*cases()], indirect=["family"])
def test_tokens(one: Starter, family: tuple[Path, Answers], device: str, place: str, variant: str) -> None:
    model, (dataset, expected) = family
    of = LAYOUTS[place]
    if len(of.parts) == 1:
        ((_, shape),) = of.parts
        where = layout(*shape)
    else:
        (n_contexts, context), (n_generations, generation) = of.parts
        file = sections(one.folder / "parts.yaml", context, generation, n_contexts, n_generations)
        where = ["--disagg_config", file]
    ended = one.run(
        of.n_ranks + 1,
        *("--model_path", model, "--dataset_path", dataset, "--dtype", "float32", "--save_outputs"),
        *("--max_output_len", FAMILY_TOKENS, "--min_query_count", FAMILY_PROMPTS, "--num_threads", 1),
        *("--device", device, *where, *VARIANTS[variant]),
        core="torch",
        timeout=300,
    ).must(DONE)
    found = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    assert [found[index] for index in range(FAMILY_PROMPTS)] == expected
    instances = ended.result["per_instance"]
    print(place, variant, instances)
    if variant == "evictions" and len(instances) == 1 and not load_model_config(str(model)).widest_window:
        assert instances[0]["preemptions"] > 0  # no sequence needs more than its window's blocks
    if "guesses" in variant:
        assert sum(instance.get("drafted_tokens", 0) for instance in instances) > 0  # contexts guess nothing
