"""The metrics endpoint of a real tritonserver with the embedded engine: values of a known load.

Only with `make test-triton`.
"""

from __future__ import annotations

import itertools
import json
import re
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helpers.real_triton import EMBEDDED, MARKS, TIMEOUT_S, generate, post, serving
from tests.helpers.support import Starter, wait_until

pytestmark = MARKS

PROMPT, N_LONG, OUTPUT = [5, 6, 7, 8, 9], 3, 1500
FAMILIES = {
    "request": {"context", "scheduled", "max", "active"},
    "runtime_memory": {"pinned", "gpu", "cpu"},
    "kv_cache_block": {"tokens_per", "used", "free", "max"},
    "general": {"iteration_counter", "timestamp"},
    "disaggregated_serving": {"kv_cache_transfer_ms", "request_count"},
}


Metrics = dict[str, dict[str, float]]


def metrics(port: int, model: str) -> Metrics:
    """Return the `nv_trt_llm_*` values of a model by family and name."""
    with urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=300) as answer:
        text = answer.read().decode()
    found: Metrics = {}
    for name, labels, value in re.findall(r"^nv_trt_llm_(\w+)_metrics\{(.*?)\} (\S+)$", text, re.MULTILINE):
        known = dict(re.findall(r'(\w+)="(.*?)"', labels))
        assert (known.pop("model"), known.pop("version")) == (model, "1")
        (which,) = known.values()
        found.setdefault(name, {})[which] = float(value)
    return found


@pytest.mark.parametrize("kind", ["inflight_fused_batching", "V1"])
def test_metrics(kind: str, one: Starter) -> None:
    """Values are right for a server at rest, with three long requests, and at rest again."""
    flags = f"{EMBEDDED},gpt_model_type:{kind},enable_kv_cache_reuse:true"
    generate(one, "--triton_text_models", flags=flags)
    with serving(one) as (_, (http,)):
        log = next((one.folder / "servers").glob("*.log")).read_text()
        port = int(log.split("--metrics-port=")[1].split()[0])
        own = "v1" if kind == "V1" else "inflight_batcher"
        rest = metrics(port, "tensorrt_llm")
        assert rest.keys() == {*FAMILIES, own}
        for name, values in FAMILIES.items():
            assert rest[name].keys() == values
        assert (rest["request"]["max"], rest["request"]["active"]) == (8, 0)
        blocks = rest["kv_cache_block"]
        assert blocks["used"] == 0 and blocks["free"] == blocks["max"] > 0
        assert rest["runtime_memory"]["cpu"] > 1 << 20
        assert abs(rest["general"]["timestamp"] - time.time()) < TIMEOUT_S

        body = {
            "input_ids": PROMPT,
            "input_lengths": len(PROMPT),
            "request_output_len": OUTPUT,
            "end_id": -1,
        }
        with ThreadPoolExecutor(N_LONG) as threads:
            answers = [threads.submit(post, http, "tensorrt_llm/generate", body) for _ in range(N_LONG)]
            at_work = wait_until(
                lambda: found if works(found := metrics(port, "tensorrt_llm"), own, blocks) else None,
                "three requests, which generate",
                TIMEOUT_S,
            )
            lengths = [json.loads(answer.result())["sequence_length"] for answer in answers]
        assert all(length - OUTPUT in (0, len(PROMPT)) for length in lengths)
        most = N_LONG * -(-(len(PROMPT) + OUTPUT) // int(blocks["tokens_per"]))
        assert at_work["kv_cache_block"]["used"] <= most

        total = {
            "total_generation_tokens": N_LONG * OUTPUT,
            "total_context_tokens": N_LONG * len(PROMPT),
            "empty_generation_slots": 0,
        }

        def has_ended(found: Metrics) -> bool:
            steps = found["general"]["iteration_counter"] - rest["general"]["iteration_counter"]
            return (
                found["request"]["active"] == 0
                and found["kv_cache_block"]["free"] == blocks["max"]
                and OUTPUT <= steps <= N_LONG * OUTPUT
                and (own != "v1" or {name: found[own][name] - rest[own][name] for name in total} == total)
            )

        wait_until(lambda: has_ended(metrics(port, "tensorrt_llm")), "no request, and all counted", TIMEOUT_S)
        if own == "v1":
            check_reuse(port, http, int(blocks["tokens_per"]))


def check_reuse(port: int, http: int, per_block: int) -> None:
    """For a repeated prompt only the last block is computed, and the answer is the same."""

    def computed() -> int:
        return int(metrics(port, "tensorrt_llm")["v1"]["total_context_tokens"])

    prompt = [3 + i % 200 for i in range(3 * per_block)]
    body = {"input_ids": prompt, "input_lengths": len(prompt), "request_output_len": 5, "end_id": -1}
    counts, answers = [computed()], list[str]()
    for _ in range(2):
        answers.append(json.loads(post(http, "tensorrt_llm/generate", body))["output_ids"])
        wait_until(lambda: computed() > counts[-1], "a prompt's tokens", TIMEOUT_S)
        counts.append(computed())
    first, second = (after - before for before, after in itertools.pairwise(counts))
    assert first == len(prompt) and 0 < second <= per_block
    assert answers[0] == answers[1]


def works(found: Metrics, own: str, blocks: dict[str, float]) -> bool:
    """Return whether the metrics are those of three requests that generate.

    The model tells its values one after another: a look may find some of them new and others old.
    """
    request, cache = found["request"], found["kv_cache_block"]
    is_old = cache["used"] < 1 or cache["used"] + cache["free"] != blocks["max"]
    if is_old or (request["active"], request["context"]) != (N_LONG, 0):
        return False
    if own == "v1":  # a static batch does not take in those that come later
        return request["scheduled"] > 0
    generating = {"micro_batch_id": 0, "generation_requests": N_LONG, "total_context_tokens": 0}
    return request["scheduled"] == N_LONG and found[own] == generating
