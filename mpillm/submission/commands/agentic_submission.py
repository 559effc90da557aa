"""``python -m mpillm agentic-submission``: a curve of agentic points, measured with MLCommons' client."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from launch.command import Command, find_program
from mpillm.cores.openai_client.client_thread import ClientThread
from mpillm.cores.openai_client.endpoint import EndpointError, RemoteServer
from mpillm.cores.openai_client.readiness import until_ready
from mpillm.errors import ExitCode, StageError
from mpillm.files import as_written, read_json, read_object, write_json
from mpillm.options.command_line import Parser
from mpillm.options.field import option
from mpillm.options.parsers import one_of, seconds
from mpillm.options.values import collect
from mpillm.programs.load_clients.inference_endpoint import CONFIG_LEFT, SUMMARY_LEFT
from mpillm.programs.load_clients.kinds import kind_of
from mpillm.report.console import Console
from mpillm.report.numbers import rate_text
from mpillm.submission.agentic_rules import (
    AGENTIC,
    SWE_BENCH_NAME,
    AgenticConfig,
    min_agentic_duration_s,
    scores_of,
    shortfalls,
    swe_bench_line,
)
from mpillm.submission.client_form import ACCURACY, CLIENT, CONFIG, SUMMARY
from mpillm.submission.client_points import run_program
from mpillm.submission.curve_command import (
    GROUP,
    SEEDS,
    CurveOptions,
    check_point,
    exit_code,
    finish,
    is_measured,
    make_curve,
    measured_points,
    need,
    print_seed_set,
)
from mpillm.submission.endpoint_points import NOTES, Curve, system_tps, write_yaml

_REPORT = "inference-endpoint"  # the client's folder, in a run's
_SCORES = f"{_REPORT}/accuracy/accuracy_results.json"
_TRIES = 3
_MARGIN = 1.3  # factor on the conversations that the rate so far requires
_MAX_RUN_S = 7 * 86400.0  # a run with 200 software tasks takes days on a slow server
_ANSWER_S = 60.0
_NO_WARM_UP = {
    "duration_s": 0,
    "requests_issued": 0,
    "requests_completed": 0,
    "data_source": "no warm-up",
    "concurrency": 0,
}


class _Options(CurveOptions, group=GROUP):
    """Options of ``agentic-submission``."""

    benchmarks = option("the benchmark", one_of(*AGENTIC))
    client_config = option(
        "MLCommons' configuration of its client for the model, such as qwen_agentic_benchmark.yaml"
    )
    model = option("the model's name at the server [default: the one in --client_config]")
    dataset_path = option("the conversations [default: the path in --client_config]")
    min_duration = option("of each point [default: 600 s up to concurrency 32, 2400 s above]", seconds)


def main(argv: Sequence[str]) -> int:
    """Measure the points without a result, and write the files of all points.

    Exit codes: NOT_READY if the server is not ready; TEST_FAILED if a threshold is not reached. Raises
    StageError if MLCommons' client fails; completed points remain.
    """
    parser = Parser(
        prog="mpillm agentic-submission",
        description="Measure a curve of agentic points for MLPerf Endpoints with MLCommons' client:"
        " conversations at fixed concurrency, their inline accuracy, and SWE-bench at one point in each"
        " region. `endpoints-submission-cli check-submission` reads the folder. Points that have a result"
        " there are not measured again.",
        epilog="example:\n  python -m mpillm agentic-submission --url localhost:30000 --benchmarks"
        " qwen3.6-35b-a3b --client_config qwen_agentic_benchmark.yaml --max_supported_concurrency 64"
        " --submitter Us --system_name 8xH200 --system_description system.json --system_power power.json"
        " --output build/endpoints",
    )
    options = collect(argv, _Options, parser)
    need(options, "agentic-submission", "benchmarks", "client_config")
    config = AgenticConfig.read(options.client_config or "")
    benchmark = AGENTIC[options.benchmarks or ""]
    curve = make_curve(options, benchmark.endpoints, config.trajectories, agentic=True)
    find_program(CLIENT, kind_of(CLIENT).install, typed=True)
    print_seed_set(curve)
    for line in config.violations():
        print(f"not official  {line} (--client_config)")
    try:
        _measure(options, curve, config)
    except EndpointError as error:
        print(f"mpillm: {error}", file=sys.stderr)
        return ExitCode.NOT_READY
    readme = f"{options.benchmarks} on {options.url}, measured with `mpillm agentic-submission`.\n"
    finish(options, curve, readme)
    scores = {c: _scores(curve.folder(c)) for c in curve.points}
    lengths = {c: _output_len(curve.folder(c)) for c in curve.points}
    if mean := swe_bench_line(benchmark, [*scores.values()]):
        print(f"SWE-bench   {mean}")
    else:
        print("yours       SWE-bench: --client_config has no data set for it (swe_bench_scorer)")
    if unknown := [f"r{c}" for c, length in lengths.items() if length is None]:
        print(f"yours       tokens per response of the full run: not reported at {', '.join(unknown)}")
    return exit_code([*shortfalls(benchmark, scores, lengths)])


def _measure(options: _Options, curve: Curve, config: AgenticConfig) -> None:
    for c, notes in measured_points(curve).items():
        check_point(curve, curve.folder(c), notes, _present(options, config, c))
    earlier = {c for c in curve.points if SWE_BENCH_NAME in _scores(curve.folder(c))}
    scored = curve.regions.accuracy_points(curve.points, True, earlier) if config.has_swe_bench else []
    todo = [c for c in curve.points if not is_measured(curve.folder(c))]
    unscored = [c for c in scored if SWE_BENCH_NAME not in _scores(curve.folder(c))]
    for c in sorted({*curve.points} - {*todo, *unscored}):
        print(f"{curve.title(c):>17}  measured earlier")
    if not (todo or unscored):
        return
    url = _ready_url(options)
    for c in sorted({*todo, *unscored}):
        try:
            if c in todo:
                _point(options, curve, config, c, url)
            if c in scored:
                _swe_bench(options, curve, config, c, url)
        except StageError as error:
            raise StageError(f"{curve.title(c)}: {error}") from None


def _present(options: _Options, config: AgenticConfig, c: int) -> dict[str, Any]:
    """Return the options that affect a point's result."""
    names = ("url", "benchmarks", "model", "dataset_path")
    values = {name: options.values[name] for name in names}
    return values | {"client_config": config.content, "min_duration": _lasts(options, c)}


def _lasts(options: _Options, c: int) -> float:
    return options.min_duration if options.min_duration is not None else min_agentic_duration_s(c)


def _ready_url(options: _Options) -> str:
    """Wait until the server is ready; return its URL. Raises ConfigError for a wrong URL, EndpointError."""
    try:
        server = RemoteServer(options.url or "")
    except ConfigError:  # the key
        raise
    except ValueError as error:
        raise ConfigError(f"--url {error}", about=["url"]) from None
    thread, console, began = ClientThread("mpillm-http"), Console(sys.stdout, sys.stderr), time.monotonic()

    def report_wait(waiting: str) -> None:
        console.wait("ready", time.monotonic() - began, waiting)

    try:
        ready = until_ready(server, options.ready_deadline, report_wait, longer="--ready_deadline")
        thread.run(ready, options.ready_deadline + _ANSWER_S)
    finally:
        thread.stop()
    return server.url


def _run(
    options: _Options,
    curve: Curve,
    config: AgenticConfig,
    c: int,
    url: str,
    *,
    mode: str,
    repeats: int = 1,
) -> Path:
    """Run the client, and return the folder with its report, beside the submission."""
    folder = (curve.root.parent / CLIENT / f"r{c}{'-accuracy' if mode == 'acc' else ''}").absolute()
    if folder.exists():  # has the report of an earlier try
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    content = config.of_point(
        url=url,
        model=options.model,
        dataset=options.dataset_path,
        concurrency=c,
        repeats=repeats,
        seeds=curve.seed_set.seeds,
        report=folder / _REPORT,
        with_accuracy=mode != "perf",
    )
    write_yaml(folder / "client.yaml", content)
    argv = (CLIENT, "benchmark", "from-config", "--config", str(folder / "client.yaml"), "--mode", mode)
    run_program(kind_of(CLIENT).located(Command(argv)), folder.with_suffix(".log"), _MAX_RUN_S)
    return folder


def _point(options: _Options, curve: Curve, config: AgenticConfig, c: int, url: str) -> None:
    """Measure a point. The client takes a number of conversations, so one that is too short is repeated."""
    lasts, repeats = _lasts(options, c), 1
    for tries_left in reversed(range(_TRIES)):
        left = _run(options, curve, config, c, url, mode="perf", repeats=repeats)
        with as_written(left / SUMMARY_LEFT):
            summary = read_object(left / SUMMARY_LEFT)
            seconds, failed = (summary["duration_ns"] or 0) / 1e9, int(summary["n_samples_failed"])
        if failed:
            raise StageError(f"{failed:,} requests failed; see {left / _REPORT}")
        if seconds >= lasts:
            break
        if not tries_left:
            raise StageError(f"{repeats * config.trajectories:,} conversations take less than {lasts:g} s")
        repeats = max(repeats + 1, math.ceil(_MARGIN * repeats * lasts / max(seconds, 1e-3)))
        again = f"again, {repeats} times all conversations"
        print(f"{curve.title(c):>17}  {seconds:.1f} s are too short: {again}", flush=True)
    folder = curve.folder(c)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ACCURACY).unlink(missing_ok=True)
    for source, name in ((SUMMARY_LEFT, SUMMARY), (CONFIG_LEFT, CONFIG), (_SCORES, ACCURACY)):
        if (left / source).exists():
            shutil.copyfile(left / source, folder / name)
    notes = {name: value for name, value in _present(options, config, c).items() if value is not None}
    notes |= {"seed_set": curve.seed_set.name, SEEDS: dict(curve.seed_set.seeds), "warmup": _NO_WARM_UP}
    write_yaml(folder / NOTES, notes | {"repeats": repeats})
    curve.write_point(c)
    print(_line(curve.title(c), summary, _scores(folder)), flush=True)


def _swe_bench(options: _Options, curve: Curve, config: AgenticConfig, c: int, url: str) -> None:
    """Measure a point's accuracy on software tasks, and add it to its scores."""
    left = _run(options, curve, config, c, url, mode="acc")
    with as_written(left / _SCORES):
        entries = list(read_object(left / _SCORES)["accuracy_scores"])
        names = {one["dataset_name"] for one in entries}
    file = curve.folder(c) / ACCURACY
    results = read_object(file) if file.exists() else {"accuracy_scores": []}
    with as_written(file):
        others = [one for one in results["accuracy_scores"] if one["dataset_name"] not in names]
    write_json(file, results | {"accuracy_scores": [*others, *entries]})
    print(f"{'':>18} accuracy: {_percent(_scores(curve.folder(c)))}", flush=True)


def _scores(folder: Path) -> dict[str, float]:
    """Return a point's scores in percent, by data set; "" is the inline score."""
    file = folder / ACCURACY
    if not file.exists():
        return {}
    with as_written(file):
        return scores_of(read_json(file))


def _output_len(folder: Path) -> float | None:
    """Return the mean tokens of a response over the full run; None: the client does not report it."""
    with as_written(folder / SUMMARY):
        full = read_object(folder / SUMMARY).get("output_sequence_lengths_full_run")
        return float(full["output_sequence_lengths"]["avg"]) if full else None


def _line(title: str, summary: Mapping[str, Any], scores: Mapping[str, float]) -> str:
    tokens, latency = (summary.get(key, {}).get("total") for key in ("output_sequence_lengths", "latency"))
    rate = f"  {rate_text(1e9 * tokens / latency)} tokens/s end to end" if tokens and latency else ""
    return (
        f"{title:>17}  {summary['n_samples_issued']:,} turns in {summary['duration_ns'] / 1e9:.1f} s"
        f"  {rate_text(system_tps(summary))} tokens/s{rate}  {_percent(scores)}"
    )


def _percent(scores: Mapping[str, float]) -> str:
    return ", ".join(f"{name or 'inline'} {value:.2f} %" for name, value in sorted(scores.items()))
