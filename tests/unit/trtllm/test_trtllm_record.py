"""Every flag and YAML key that we pass to TensorRT-LLM's programs exists there, by the record of its
interface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import disagg
from mpillm.cli import main
from mpillm.stages.disagg_servers import disaggregated_servers
from mpillm.trtllm import trtllm_serve
from mpillm.trtllm.tool_options import BUILD, CONVERT, QUANTIZE, Tool
from tests.helpers.trtllm_records import NEWEST, OLDEST, RELEASES, WHOLE, WITH_ENGINES, record

LACKING = {"quantize.py": {"export_format"}}  # docs/howto/pipeline.md says so


@pytest.mark.parametrize("release", [NEWEST, WHOLE])
@pytest.mark.parametrize("tool", [QUANTIZE, CONVERT, BUILD], ids=lambda tool: tool.name)
def test_the_options_of_its_tools(tool: Tool, release: str) -> None:
    """The record has every option that a person may give or that a field of ours sets."""
    there = {option.removeprefix("--") for option in record(release)["tools"][tool.name]}
    ours = {*tool.options, *tool.fields}
    # The sizes are the checkpoint's: trtllm-build is not told them, and quantize.py has no experts'
    # parallelism.
    of_checkpoint = {"tp_size", "pp_size", "moe_ep_size"}
    assert ours - there - of_checkpoint == LACKING.get(tool.name, set())
    assert len(ours & there) > 20, "or the record is empty"


@pytest.mark.parametrize(
    ("release", "config"),
    [
        *((release, "--extra_llm_api_options") for release in RELEASES),
        *((one, "--config") for one in RELEASES[:3]),
    ],
)
def test_the_flags_of_trtllm_serve(release: str, config: str, tmp_path: Path) -> None:
    """The record has every flag that `run-llm-server` writes."""
    tools = record(release)["tools"]
    yaml_config = disagg.parse(
        "model: m\ncontext_servers: {urls: ['a:1']}\ngeneration_servers: {urls: ['a:2']}"
    )
    sizes = (
        "backend",
        "tp_size",
        "pp_size",
        "ep_size",
        "max_batch_size",
        "max_num_tokens",
        "max_beam_width",
        "max_seq_len",
    )
    options = dict.fromkeys((*sizes, "num_postprocess_workers"), 2)
    model, extra = ["m", "--tokenizer", "t"], (tmp_path / "extra.yaml", "")
    servers = [
        *trtllm_serve.endpoints("trtllm-serve", model, "127.0.0.1", [30000], options, config, extra, 1, None),
        *disaggregated_servers(
            trtllm_serve.disaggregated("trtllm-serve", "f", 5, 5), "f", yaml_config, None, None
        ),
    ]
    passed = 0
    for server in servers:
        words = [*server.command.argv]
        words = words[words.index("trtllm-serve") + 1 :]
        flags = [word for word in words[1:] if word.startswith("-")]
        passed += len(flags)
        assert {*flags} <= {*tools[f"trtllm-serve {words[0]}"]}
    assert passed == 17


def keys(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the keys of a YAML from the outside in."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield (*path, name)
            yield from keys(inner, (*path, name))


def fields(python: Mapping[str, Any], name: str) -> set[str]:
    """Return the fields of a class of LLM arguments, those of its bases included."""
    spec = python.get(name)
    if not spec:
        return set()
    return {field.rstrip("=") for field in spec["fields"]}.union(
        *(fields(python, base) for base in spec["bases"])
    )


NESTED = {
    "kv_cache_config": "KvCacheConfig",
    "scheduler_config": "SchedulerConfig",
    "cache_transceiver_config": "CacheTransceiverConfig",
}


LATER = {  # than 0.20, which has pydantic pass over them in silence: docs/howto/pipeline.md says so
    ("kv_cache_config", "tokens_per_block"),
    ("kv_cache_config", "dtype"),
    ("cache_transceiver_config", "backend"),
}


@pytest.mark.parametrize(
    ("backend", "arguments", "release"),
    [
        *(("pytorch", "TorchLlmArgs", release) for release in RELEASES),
        *(("cpp", "TrtLlmArgs", release) for release in WITH_ENGINES),
    ],
)
def test_the_keys_of_a_generated_yaml(
    backend: str,
    arguments: str,
    release: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The record has every key that generate-disagg-config can write for TensorRT-LLM's servers."""
    monkeypatch.chdir(tmp_path)
    line = [
        "generate-disagg-config",
        "--core_type=trtllm_disagg",
        "--model_path=m",
        "--engine_dir=e",
        "--world_size=6",
        "--dry_run",
    ]
    line += [
        "--ctx_tp_size=2",
        "--gen_tp_size=2",
        f"--trtllm_runtime_flags=trtllm_backend:{backend}",
        "--max_batch_size=4",
    ]
    line += [
        "--max_num_tokens=64",
        "--max_seq_len=128",
        "--kv_cache_tokens=512",
        "--tokens_per_block=32",
        "--enable_kv_cache_reuse=true",
    ]
    line += [
        "--enable_chunked_context=true",
        "--beam_width=1",
        "--traffic_distribution_policy=round_robin",
        "--dtype=bfloat16",
    ]
    assert main(line) == 0
    made = yaml.safe_load(capsys.readouterr().out)
    python = record(release)["python"]
    top = {name.rstrip("=") for name in python["extract_disagg_cfg"]["parameters"]}
    # extract_router_config
    section = {name.rstrip("=") for name in python["extract_ctx_gen_cfgs"]["parameters"]} | {"router"}
    found, lacking = [*keys(made)], set()
    for path in found:
        outer, inner = (path[0], path[1:]) if path[0].endswith("_servers") else ("", path)
        if len(inner) == 0 or inner[0] == "router":
            assert outer in top
        elif len(inner) == 1:
            assert inner[0] in fields(python, arguments) | (section if outer else top), path
        elif inner[1] not in fields(python, NESTED[inner[0]]):
            lacking.add(inner)
    assert lacking <= (LATER if release == OLDEST else set())
    assert len(found) > 20, "or nothing was looked at"
