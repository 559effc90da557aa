"""What the embedded engine answers behind a real tritonserver, against transformers and PEFT.

Only with `make test-triton`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpillm.engine.shape.families.known import FAMILIES
from tests.helpers.adapters import ALL, make_adapter, with_adapter
from tests.helpers.families import make_family
from tests.helpers.layouts import oracle
from tests.helpers.make_checkpoint import make_tokenizer
from tests.helpers.oracle import Oracle
from tests.helpers.presets import save_preset
from tests.helpers.real_triton import MARKS, N_OUTPUT, PROMPTS, generate, serving
from tests.helpers.support import DONE, Starter
from tests.helpers.triton_requests import Asker, Refusal

pytestmark = MARKS

N_LONG = 1500  # tokens of an answer that is stopped


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_answers_of_every_kind(n_ranks: int, one: Starter) -> None:
    folder = one.folder / "model"
    save_preset("tiny-llama", folder)
    make_tokenizer(folder)
    oracle = Oracle(folder)
    generate(one, f"--model_path={folder}", "--triton_text_models", f"--tensor_parallelism={n_ranks}")
    with serving(one) as ((port,), _), ThreadPoolExecutor(8) as threads:
        asker = Asker(port, "tensorrt_llm")
        plain = [oracle.tokens(prompt, N_OUTPUT) for prompt in PROMPTS]
        check_log_probs_and_logits(asker, oracle, plain)
        check_a_batch(asker, plain)
        check_choices(asker, oracle, plain, threads)
        check_beams(asker, oracle, plain, threads)
        check_adapters(one, asker, folder, plain, threads)
        check_stop(asker)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "LlamaForCausalLM"])
def test_each_family(name: str, one: Starter) -> None:
    """A batch, and logits of prompts that are longer than windows. Weights are bfloat16 unless told."""
    model = make_family(name, one.folder / "model")
    make_tokenizer(one.folder / "model")
    prompts = [[3 + (7 * i + j) % 300 for j in range(n)] for i, n in enumerate((3, 17, 40, 59))]
    expected = oracle(model, prompts, N_OUTPUT)
    generate(one, f"--model_path={one.folder / 'model'}", "--dtype=float32", "--triton_text_models")
    with serving(one) as ((port,), _):
        asker = Asker(port, "tensorrt_llm")
        answers = asker.ask(prompts, N_OUTPUT)
        found = {int(answer["batch_index"].item()): answer["output_ids"][0, 0].tolist() for answer in answers}
        assert [found[i] for i in range(len(prompts))] == expected
        (answer,) = asker.ask([prompts[3]], N_OUTPUT, return_context_logits=True)
        with torch.no_grad():
            logits = model(torch.tensor([prompts[3]])).logits[0].numpy()
        np.testing.assert_allclose(answer["context_logits"][0], logits, atol=1e-3)


def check_log_probs_and_logits(asker: Asker, oracle: Oracle, plain: list[list[int]]) -> None:
    wants = {f"return_{name}": True for name in ("log_probs", "context_logits", "generation_logits")}
    for prompt, tokens in zip(PROMPTS, plain, strict=True):
        n, logits = len(prompt), oracle.logits(prompt + tokens)
        expected = logits.log_softmax(-1)[n - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()
        (answer,) = asker.ask([prompt], N_OUTPUT, **wants)
        assert answer["output_ids"].tolist() == [[tokens]]
        np.testing.assert_allclose(answer["output_log_probs"], expected[None, None], atol=1e-4)
        np.testing.assert_allclose(answer["cum_log_probs"], [[expected.sum()]], atol=1e-4)
        np.testing.assert_allclose(answer["context_logits"], logits[None, :n], atol=1e-3)
        np.testing.assert_allclose(answer["generation_logits"], logits[None, None, n - 1 : -1], atol=1e-3)
        parts = asker.ask([prompt], N_OUTPUT, streaming=True, **wants)
        assert len(parts) > 1
        # whichever response a client reads, as inflight_batcher_llm_client.py does the last
        for part in parts:
            np.testing.assert_array_equal(part["context_logits"], parts[0]["context_logits"])
        np.testing.assert_allclose(parts[0]["context_logits"], answer["context_logits"], atol=1e-4)
        for name, axis in (("output_ids", 2), ("output_log_probs", 2), ("generation_logits", 2)):
            together = np.concatenate([part[name] for part in parts], axis=axis)
            np.testing.assert_allclose(together, answer[name], atol=1e-4)
        np.testing.assert_allclose(parts[-1]["cum_log_probs"], answer["cum_log_probs"], atol=1e-4)


def check_a_batch(asker: Asker, plain: list[list[int]]) -> None:
    """Check that a batch has one response for each prompt, by its index."""
    answers = asker.ask(PROMPTS, N_OUTPUT)
    found = {int(one["batch_index"].item()): one["output_ids"][0, 0].tolist() for one in answers}
    assert found == dict(enumerate(plain)) and len(answers) == len(PROMPTS)


def check_choices(asker: Asker, oracle: Oracle, plain: list[list[int]], threads: ThreadPoolExecutor) -> None:
    """Check options of concurrent requests; the engine refuses unsupported options by name."""

    def answer(number: int, **tensors: Any) -> list[int]:
        (one,) = asker.ask([PROMPTS[number]], N_OUTPUT, **tensors)
        tokens: list[int] = one["output_ids"][0, 0].tolist()
        return tokens

    first, second = plain[0], plain[1]
    sampled = {"runtime_top_k": 50, "temperature": 2.0}
    cases: dict[str, tuple[int, dict[str, Any], list[int] | None]] = {
        "bad words": (
            1,
            {"bad_words_list": [[second[2], second[3], second[0]], [2, 3, -1]]},
            oracle.tokens(PROMPTS[1], N_OUTPUT, bad_words_ids=[[second[2], second[3]], [second[0]]]),
        ),
        "repetition": (
            3,
            {"repetition_penalty": 1.7},
            oracle.tokens(PROMPTS[3], N_OUTPUT, repetition_penalty=1.7),
        ),
        "presence": (0, {"presence_penalty": 2.0}, None),
        "frequency": (0, {"frequency_penalty": 2.0}, None),
        "end": (0, {"end_id": first[2]}, first[: first.index(first[2]) + 1]),
        "stop": (0, {"stop_words_list": [[first[2], first[3]], [2, -1]]}, first[:4]),
        "not yet": (0, {"end_id": first[0], "min_tokens": 4}, None),
        "seed 1": (0, {**sampled, "seed": np.uint64(1)}, None),
        "seed 1 again": (0, {**sampled, "seed": np.uint64(1)}, None),
        "seed 2": (0, {**sampled, "seed": np.uint64(2)}, None),
        "a tiny top-p": (0, {"runtime_top_p": 0.0001, "temperature": 2.0}, first),
    }
    open_ = {name: threads.submit(answer, n, **tensors) for name, (n, tensors, _) in cases.items()}
    found = {name: future.result() for name, future in open_.items()}
    for name, (_, _, expected) in cases.items():
        if expected is not None:
            assert found[name] == expected, name
    assert first != found["presence"] and first != found["frequency"]
    assert first[0] not in found["not yet"][:4]
    assert found["seed 1"] == found["seed 1 again"] != found["seed 2"]
    for refused in (
        {"runtime_top_p_decay": 0.5},
        {"bad_words_list": [[9999], [1]]},
        {"draft_input_ids": [3]},
    ):
        with pytest.raises(Refusal, match=next(iter(refused))):
            asker.ask([[5]], 4, **refused)


def check_beams(asker: Asker, oracle: Oracle, plain: list[list[int]], threads: ThreadPoolExecutor) -> None:
    """Check beams token by token and score by score, beside greedy requests; shorter beams are padded."""
    cases = [(0, 2, -1, 0.0), (1, 4, -1, 1.0), (2, 3, None, 0.0), (3, 4, -1, 1.0)]

    def search(number: int, width: int, end_id: int | None, penalty: float) -> None:
        end = oracle.tokens(PROMPTS[number], N_OUTPUT)[2] if end_id is None else end_id
        (answer,) = asker.ask(
            [PROMPTS[number]],
            N_OUTPUT,
            beam_width=width,
            end_id=end,
            len_penalty=penalty,
            early_stopping=False,
            return_log_probs=True,
        )
        ends = (end,) if end >= 0 else ()
        wanted = oracle.beams(PROMPTS[number], N_OUTPUT, width, ends, length_penalty=penalty)
        lengths = answer["sequence_length"][0].tolist()
        assert answer["output_ids"].shape[1] == width == len(lengths)
        for beam, n in enumerate(lengths):
            tokens = answer["output_ids"][0, beam, :n].tolist()
            expected, score = wanted[beam]
            assert tokens == expected[:n]
            total = float(answer["cum_log_probs"][0, beam])
            assert total / n**penalty == pytest.approx(score, abs=1e-4)
            assert total == pytest.approx(float(answer["output_log_probs"][0, beam].sum()), abs=1e-4)
            logprobs = oracle.logprobs(PROMPTS[number], tokens)
            alone = sum(float(logprobs[i, token]) for i, token in enumerate(tokens))
            assert total == pytest.approx(alone, abs=1e-3)

    searches = [threads.submit(search, *case) for case in cases]
    check_a_batch(asker, plain)
    for future in searches:
        future.result()
    for name, value in (("streaming", True), ("runtime_top_p", 0.5)):
        with pytest.raises(Refusal, match=f"{name}: not with a beam_width"):
            asker.ask([[5]], 4, beam_width=2, **{name: value})
    with pytest.raises(Refusal, match="max_beam_width is 4"):
        asker.ask([[5]], 4, beam_width=5)


def check_adapters(
    one: Starter, asker: Asker, folder: Path, plain: list[list[int]], threads: ThreadPoolExecutor
) -> None:
    """Check adapters whose weights come with the first request and the id afterwards: two adapters and none
    in a batch."""
    tensors: dict[int, dict[str, Any]] = {}
    answers: dict[int, list[list[int]]] = {0: plain}
    for task_id, modules in ((7, ALL), (8, ("q_proj", "v_proj"))):
        adapter, made = one.folder / f"adapter-{task_id}", one.folder / f"tensors-{task_id}"
        make_adapter(folder, adapter, task_id, modules)
        one.mpillm("hf-lora-convert", "-i", adapter, "-o", made, "--storage-type", "float16").must(DONE)
        oracle = Oracle(folder)
        oracle.model = with_adapter(oracle.model, adapter)
        answers[task_id] = [oracle.tokens(prompt, N_OUTPUT) for prompt in PROMPTS]
        tensors[task_id] = {
            "lora_task_id": np.uint64(task_id),
            "lora_weights": np.load(made / "model.lora_weights.npy")[0],
            "lora_config": np.load(made / "model.lora_config.npy")[0],
        }
    with pytest.raises(Refusal, match=r"LoRA task 7 not found in cache\. Please send LoRA weights"):
        asker.ask([[5]], 4, lora_task_id=np.uint64(7))
    tensors[0] = {}

    def answer(task_id: int, number: int) -> list[int]:
        (got,) = asker.ask([PROMPTS[number]], N_OUTPUT, **tensors[task_id])
        tokens: list[int] = got["output_ids"][0, 0].tolist()
        return tokens

    for task_id, named in tensors.items():
        assert answer(task_id, 0) == answers[task_id][0]
        tensors[task_id] = {"lora_task_id": named["lora_task_id"]} if named else {}
    cases = [(task_id, number) for number in range(len(PROMPTS)) for task_id in tensors]
    for case, got in zip(cases, threads.map(lambda case: answer(*case), cases), strict=True):
        assert got == answers[case[0]][case[1]], case
    with pytest.raises(Refusal, match="lora_weights: attn_q of layer 0 has not"):
        asker.ask(
            [[5]],
            4,
            lora_task_id=np.uint64(9),
            lora_weights=np.ones((1, 8), np.float16),
            lora_config=np.array([[1, 0, 1]], np.int32),
        )


def check_stop(asker: Asker) -> None:
    """Check that a stop request ends the request of the same id with the tokens that it has."""
    request = asker.request([[5, 6]], N_LONG, "seven", streaming=True, end_id=-1)
    n, stopped = 0, False
    for part in asker.responses(request):
        n += part["output_ids"].size if part else 0
        if n and not stopped:  # the engine may make many tokens meanwhile, or none
            stopped = [*asker.responses(asker.request([[1]], 1, "seven", stop=True))] == [{}]
    assert stopped and 1 <= n < N_LONG


def test_static_batches_against_inflight_batches(one: Starter) -> None:
    """Two at a time: V1 takes the third when both have ended, the other when one has."""
    generate(one, "--triton_num_servers=1", "--triton_num_models_per_server=2")
    configs = sorted((one.folder / "repo_0").glob("*/config.pbtxt"))
    for config, kind in zip(configs, ("inflight_fused_batching", "V1"), strict=True):
        text = config.read_text().replace(r"\"max_batch_size\": 8", r"\"max_batch_size\": 2")
        config.write_text(text.replace('"inflight_fused_batching"', f'"{kind}"'))
    with serving(one) as ((port,), _):
        orders = []
        for config in configs:
            asker = Asker(port, config.parent.name)
            request = asker.request([[5], [6], [7]], 2, end_id=-1)
            place = [tensor.name for tensor in request.inputs].index("request_output_len")
            request.raw_input_contents[place] = np.array([2, 60, 2], np.int32).tobytes()
            orders.append([int(one["batch_index"].item()) for one in asker.responses(request) if one])
    assert orders == [[0, 2, 1], [0, 1, 2]]
