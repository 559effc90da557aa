"""llama-end-to-end.md of TensorRT-LLM's community, step by step, with the embedded engine behind Triton.

From a Hugging Face checkpoint to twenty requests at once by `xargs -P 20 curl`. Only with `make test-triton`.
"""

from __future__ import annotations

import json
import signal

from tests.helpers.make_checkpoint import make_checkpoint
from tests.helpers.ports import free_port
from tests.helpers.real_triton import CURL, MARKS, start, until_ready
from tests.helpers.support import DONE, Starter

pytestmark = MARKS

BODY = {**CURL, "pad_id": 2, "end_id": 2}
MODELS = ("ensemble", "postprocessing", "preprocessing", "tensorrt_llm", "tensorrt_llm_bls")


def test_from_a_checkpoint_to_twenty_curls(one: Starter) -> None:
    make_checkpoint(one.folder / "llama")
    built = ("--model_path=llama", "--engine_dir=engine")
    one.mpillm("generate-engines", *built, "--trtllm_build_flags=max_batch_size:256").must(DONE)
    flags = "triton_backend:python,max_batch_size:256,batch_scheduler_policy:max_util"
    flags += ",kvcache_free_gpu_mem_frac:0.9,max_tokens_in_paged_kv_cache:8192"
    one.mpillm(
        "generate-triton-config",
        *built,
        "--scenarios=Server",
        "--triton_model_repo=repo",
        "--triton_text_models",
        f"--trtllm_runtime_flags={flags}",
    ).must(DONE)
    configs = {path.parent.name: path.read_text() for path in (one.folder / "repo_0").glob("*/config.pbtxt")}
    assert sorted(configs) == sorted(MODELS)
    assert all("max_batch_size: 256" in text for text in configs.values())
    for name in ("tensorrt_llm", "tensorrt_llm_bls"):
        assert "decoupled: true" in configs[name]
    for value in ("inflight_fused_batching", "max_utilization", "0.9"):
        assert f'string_value: "{value}"' in configs["tensorrt_llm"]

    port = free_port()
    command = until_ready(start(one, [port]))
    lines = [line.strip() for line in command.out.splitlines()]
    edge = "+------------------+---------+--------+"
    table = lines[lines.index(edge) :][:9]
    assert table == [
        edge,
        "| Model            | Version | Status |",
        edge,
        *(f"| {name:<16} | 1       | READY  |" for name in MODELS),
        edge,
    ]
    (log,) = (one.folder / "servers").glob("*.log")
    http = log.read_text().split("--http-port=")[1].split()[0]
    url = f"localhost:{http}/v2/models/ensemble/generate"
    (one.folder / "tmp.txt").write_text(json.dumps(BODY))
    first = one.command(["bash", "-c", f"curl -s -X POST {url} -d '{json.dumps(BODY)}'"]).end().must(DONE)
    answer = json.loads(first.out)
    assert (answer["model_name"], answer["model_version"]) == ("ensemble", "1")
    assert {"cum_log_probs", "output_log_probs", "sequence_end", "sequence_id", "sequence_start"} <= {*answer}
    twenty = "printf '%s\\n' {1..20} | xargs -I % -P 20 curl -s -w '\\n' -X POST " + url + " -d @tmp.txt"
    ended = one.command(["bash", "-c", twenty]).end(120).must(DONE)
    # curls write at the same time, so that lines may stand on one
    texts, decoder, rest = [], json.JSONDecoder(), ended.out.strip()
    while rest:
        value, end = decoder.raw_decode(rest)
        texts.append(value["text_output"])
        rest = rest[end:].strip()
    assert texts == [answer["text_output"]] * 20 and texts[0]
    command.process.send_signal(signal.SIGINT)
    command.end(60).must(128 + signal.SIGINT)
