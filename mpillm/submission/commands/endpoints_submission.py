"""``python -m mpillm endpoints-submission``: a curve of points at fixed concurrency, for MLPerf Endpoints."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from launch.command import find_program
from mpillm import workloads
from mpillm.cores.clients import allow_files
from mpillm.cores.openai_client.dialect import Sampling
from mpillm.cores.openai_client.endpoint import EndpointError
from mpillm.data.dataset import Dataset, PromptLimits, load_dataset
from mpillm.data.preprocessed.loader import loader_of
from mpillm.data.tiny_dataset import REFERENCES, write_dataset
from mpillm.data.tokenizer import NoTokenizer, Tokenizer, load_tokenizer
from mpillm.errors import ExitCode, RunError, StageError
from mpillm.experiments.loadtest.endpoint_client import EndpointClient
from mpillm.files import as_written, write_json
from mpillm.options.command_line import Parser
from mpillm.options.field import option
from mpillm.options.fields.deadlines import DeadlineFields
from mpillm.options.fields.model import ModelFields
from mpillm.options.parsers import one_of, seconds
from mpillm.options.values import collect
from mpillm.programs.load_clients.inference_endpoint import named_percentiles
from mpillm.programs.load_clients.kind import LoadSpec, PromptSample, Seeds
from mpillm.programs.load_clients.kinds import kind_of
from mpillm.report.numbers import rate_text
from mpillm.submission.client_form import ACCURACY, CONFIG, SUMMARY
from mpillm.submission.client_points import measured_point
from mpillm.submission.curve_command import (
    GROUP,
    SEEDS,
    SERVED_MODEL,
    CurveOptions,
    check_point,
    exit_code,
    finish,
    is_measured,
    make_curve,
    measured_points,
    need,
    print_seed_set,
    refuse,
)
from mpillm.submission.endpoint_points import (
    NOTES,
    SALT,
    STEADY_STATE,
    WARMUP,
    Curve,
    accuracy_results,
    read_measurement,
    request_logs,
    result_summary,
    system_tps,
    write_yaml,
)
from mpillm.submission.endpoint_rules import (
    min_duration_s,
    sample_order,
    warm_up_prompts,
)
from mpillm.submission.fixed_concurrency import FixedConcurrency, FullPasses, SteadyStateGoal
from mpillm.submission.power import MEASURED, PowerWatch, local_meters
from mpillm.submission.references import read_references
from mpillm.submission.rouge import need_libraries
from mpillm.submission.salts import SALT_COUNTS, Salts, next_salt_seed
from mpillm.submission.scores import METRICS, Row, ScoredResponse
from mpillm.submission.seed_sets import (
    MODEL,
    SAMPLES,
    SCHEDULER,
)
from mpillm.submission.steady_state import SteadyState, SuperPasses, find_steady_state
from mpillm.workloads import WORKLOADS
from mpillm.workloads.workload import Workload

_BENCHMARKS = {name: named for name, workload in WORKLOADS.items() if (named := workload.endpoints)}


class _Options(CurveOptions, group=GROUP):
    """Options of ``endpoints-submission``."""

    model = option("the model's name at the server [default: the only one]")
    model_path = ModelFields.model_path.but("a folder with the model's tokenizer, for text", group=GROUP)
    benchmarks = option("the workload", one_of(*_BENCHMARKS))
    model_scale = option("tiny: a scaled-down data set", one_of("full", "tiny"), default="full")
    dataset_path = option("the data set, with its reference answers")
    offline = option(
        "elected: the point of the highest concurrency also represents Offline; dedicated: a separate run,"
        " which sends a whole data set together",
        one_of("elected", "dedicated"),
        default="elected",
    )
    min_duration = option(
        "issue time of each point's steady state [default: 600 s up to concurrency 32, 1200 s above]", seconds
    )
    max_duration = option(
        "without a steady state, no pass over the data set begins after this time [default: three times"
        " min_duration]",
        seconds,
    )
    harness = option(
        "measure points with MLCommons' client as it is, which Standardized entries need; it must be in PATH"
        " [default: mpillm's own client]",
        one_of("inference-endpoint"),
    )
    stall_timeout = DeadlineFields.stall_timeout.but(
        "longest silence of a server with outstanding requests", default=300.0, group=GROUP
    )


def main(argv: Sequence[str]) -> int:
    """Measure the points without a result, and write the files of all points.

    Exit codes: NOT_READY if the server is not ready; TEST_FAILED if requests failed, or an accuracy could not
    be measured. Raises StageError if MLCommons' client fails; completed points remain.
    """
    parser = Parser(
        prog="mpillm endpoints-submission",
        description="Measure a curve for MLPerf Endpoints: points at fixed concurrency of any"
        " OpenAI-compatible server, and the accuracy in each region, as a folder that"
        " `endpoints-submission-cli check-submission` reads. Points that have a result there are not"
        " measured again.",
        epilog="example:\n  python -m mpillm endpoints-submission --url localhost:8000 --benchmarks"
        " llama3.1-8b --model_path DIR --max_supported_concurrency 256 --submitter Us --system_name 8xH200"
        " --system_description system.json --system_power power.json --output build/endpoints",
    )
    options = collect(argv, _Options, parser)
    need(options, "endpoints-submission", "benchmarks")
    curve, workload = _curve(options)
    print_seed_set(curve)
    if options.harness:
        if not options.model_path:
            raise ConfigError("--harness needs --model_path: the client counts tokens with its tokenizer")
        find_program(options.harness, kind_of(options.harness).install, typed=True)
    try:
        failed = _measure(options, curve, workload)
    except EndpointError as error:
        print(f"mpillm: {error}", file=sys.stderr)
        return ExitCode.NOT_READY
    readme = f"{options.benchmarks} on {options.url}, measured with `mpillm endpoints-submission`.\n"
    finish(options, curve, readme)
    if workload.scaled:
        full = workloads.get(options.benchmarks or "").n_samples
        samples = f"{workload.n_samples} of the benchmark's {full:,} samples"
        print(f"tiny        {samples}: no submission, and the checker rejects it")
    if options.harness:
        print("yours       salts (rules, 2.9.5): the client gets token ids, to which it adds none")
    return exit_code(failed)


def _curve(options: _Options) -> tuple[Curve, Workload]:
    name, c_max = options.benchmarks or "", options.max_supported_concurrency or 0
    workload = workloads.get(name, options.model_scale)
    is_dedicated = options.offline == "dedicated"
    if is_dedicated and workload.n_samples <= c_max:
        raise ConfigError(
            f"--offline dedicated: its concurrency is the size of the data set, {workload.n_samples:,}, which"
            f" must be more than --max_supported_concurrency {c_max}; use --offline elected"
        )
    curve = make_curve(options, _BENCHMARKS[name], workload.n_samples, offline_run=is_dedicated)
    for c in curve.points:
        _max_duration(options, c)  # raises ConfigError
    return curve, workload


def _measure(options: _Options, curve: Curve, workload: Workload) -> list[str]:
    """Measure the points. Returns a line for each failure."""
    failed: list[str] = []
    _check_measured(options, curve)
    earlier = {c for c in curve.points if (curve.folder(c) / ACCURACY).exists()}
    scored = curve.regions.accuracy_points(curve.points, curve.offline_run, earlier)
    scored += [curve.min_samples] if curve.offline_run else []
    if workload.accuracy.metric == "by_reference":
        failed.append(f"no accuracy: {workload.name} is scored by {workload.accuracy.evaluator}")
        scored = []
    todo = []
    for c in curve.runs:
        if not is_measured(curve.folder(c)):
            todo.append(c)
        elif _may_become_steady(options, curve.folder(c), c):
            print(f"{curve.title(c):>17}  without a steady state; measured again with a longer time")
            todo.append(c)
        elif c in scored and not (curve.folder(c) / ACCURACY).exists():
            print(
                f"{curve.title(c):>17}  without its accuracy run, which must follow directly; measured again"
            )
            todo.append(c)
    for c in sorted({*curve.runs} - {*todo}):
        print(f"{curve.title(c):>17}  measured earlier")
    if not todo:
        return failed
    folder = options.model_path
    tokenizer = load_tokenizer(Path(folder)) if folder else NoTokenizer("without --model_path")
    path = _dataset_path(options, workload, curve.root.parent / "dataset")
    limits = PromptLimits(max_output_len=workload.max_output_len)
    dataset = load_dataset(path if path.suffix == ".jsonl" else loader_of(path, workload), tokenizer, limits)
    rows: Sequence[Row] = ()
    if scored:
        need_libraries()
        rows = read_references(workload, str(path / REFERENCES if workload.scaled else path))
    try:
        allow_files(max(todo))
    except RunError as error:
        raise ConfigError(str(error)) from None
    with EndpointClient(
        options.url or "",
        tokenizer,
        options.model,
        options.model_path,
        options.ready_deadline,
        options.stall_timeout,
    ) as client:
        _check_model(curve, client.endpoint.model)
        for c in todo:
            if c in scored:
                (curve.folder(c) / ACCURACY).unlink(missing_ok=True)
            failed += _point(options, curve, c, client, dataset, workload, tokenizer)
            if c in scored:
                failed += _accuracy(curve, c, client, dataset, rows, workload)
    return failed


# Options that affect a point's result, without the duration.
_MEASURED = (
    *("url", "model", "model_path", "benchmarks", "model_scale", "dataset_path"),
    "harness",
)
_MAX_DURATION = 3  # times min_duration
_TOO_SHORT = ("partial_dataset", "insufficient_passes", "insufficient_duration")


def _check_measured(options: _Options, curve: Curve) -> None:
    """Raise ConfigError if a point in the folder has other options, or is not part of the curve."""
    for c, config in measured_points(curve).items():
        present = {name: options.values[name] for name in _MEASURED} | {"min_duration": _lasts(options, c)}
        check_point(curve, curve.folder(c), config, present)
        if SALT not in config and not options.harness:
            raise refuse(curve.folder(c), "was measured without salts (rules, 2.9.5)")


def _check_model(curve: Curve, model: str) -> None:
    """Raise ConfigError if the server had another model during the measurement of a point."""
    for folder in map(curve.folder, curve.runs):
        if is_measured(folder) and (was := read_measurement(folder).get(SERVED_MODEL, model)) != model:
            raise refuse(folder, f"was measured with the server's model {was}, now it has {model}")


def _lasts(options: _Options, c: int) -> float:
    """Return the minimum duration of a point in seconds."""
    return options.min_duration if options.min_duration is not None else min_duration_s(c)


def _max_duration(options: _Options, c: int) -> float:
    """Return the time in seconds after which no further pass of a point begins."""
    min_s = _lasts(options, c)
    if options.max_duration is None:
        return _MAX_DURATION * min_s
    if options.max_duration < min_s:
        raise ConfigError(
            f"--max_duration {options.max_duration:g}: less than the steady state of concurrency {c},"
            f" {min_s:g} s (--min_duration)"
        )
    return options.max_duration


def _may_become_steady(options: _Options, folder: Path, c: int) -> bool:
    """Return whether a measured point has no steady state, and may now take longer."""
    with as_written(folder / CONFIG):
        config = read_measurement(folder)
        state, earlier = config.get(STEADY_STATE), config.get("max_duration")
        if state is None or earlier is None:
            return False
        return state["status"] in _TOO_SHORT and float(earlier) < _max_duration(options, c)


def _sampling(curve: Curve, workload: Workload) -> Sampling:
    """Return the sampling parameters. The seed is the part of the published one that all servers accept."""
    parameters = workload.sampling
    return Sampling(
        workload.max_output_len,
        temperature=parameters.get("temperature", 0.0),
        top_k=int(parameters.get("top_k", 0)),
        top_p=parameters.get("top_p", 1.0),
        seed=curve.seed_set.seeds[MODEL] & 0x7FFFFFFF,
    )


def per_user(summary: Mapping[str, Any]) -> str:
    """Return the tokens/s of a user as the end of a line, or the reason for its absence."""
    p90 = named_percentiles(summary["tpot"].get("percentiles", {})).get("90.0")
    if rate := summary.get("tps_per_user") or (1e9 / p90 if p90 else None):
        return f"  {rate_text(rate)} per user"
    if not summary["n_samples_completed"]:
        return ""
    return "  time per output token 0, which the checker rejects: most answers arrived in one piece"


def _point(
    options: _Options,
    curve: Curve,
    c: int,
    client: EndpointClient,
    dataset: Dataset,
    workload: Workload,
    tokenizer: Tokenizer,
) -> list[str]:
    folder = curve.folder(c)
    folder.mkdir(parents=True, exist_ok=True)
    lasts, max_s, size = _lasts(options, c), _max_duration(options, c), len(dataset)
    prompts = [dataset.sample(i) for i in range(len(dataset))]
    sampling = _sampling(curve, workload)
    seeds = curve.seed_set.seeds
    order = sample_order(len(prompts), seeds[SAMPLES])
    n_warm = min(c, curve.c_max)
    others = warm_up_prompts(dataset.tokens, dataset.n_tokens, n_warm, seeds[MODEL])
    warm_up = FixedConcurrency(others, iter(range(n_warm)), sampling, n_warm, n_warm)
    took = client.run(warm_up)
    warmed = sum(not record.error for record in warm_up.records)
    warmed_up = {
        "duration_s": round(took, 3),
        "requests_issued": n_warm,
        "requests_completed": warmed,
        "data_source": f"random tokens, as many as prompts of {dataset.name} have",
        "concurrency": n_warm,
        "logs_retained": True,
        "link_logs": WARMUP,
    }
    explicit = {name: value for name, value in options.values.items() if value is not None}
    notes = explicit | {
        "min_duration": lasts,
        "max_duration": max_s,
        "warmup": warmed_up,
        SERVED_MODEL: client.endpoint.model,
    }
    notes |= {"seed_set": curve.seed_set.name, SEEDS: dict(seeds)}
    failed: list[str] = []
    state: SteadyState | None = None
    power: dict[str, Any] | None = None
    if options.harness:
        load = _load_of(options, curve, c, client, dataset, sampling)
        try:
            summary, passes = measured_point(load, folder, lasts, max_s, n_warm / took)
        except StageError as error:
            raise StageError(f"{curve.title(c)}: {error}") from None
        if passes and not curve.is_offline(c):
            state = find_steady_state(passes.complete(), size, min_duration_s(c))
        write_yaml(folder / NOTES, notes | ({STEADY_STATE: state.block()} if state else {}))
    else:
        # Beside the submission, so that a point whose folder was removed also gets new salts.
        salt_seed = next_salt_seed(curve.root.parent / SALT_COUNTS, seeds[MODEL], c)
        salts = Salts(prompts, tokenizer, salt_seed)
        notes[SALT] = salts.description()
        test, passes = _own_test(curve, c, prompts, order, sampling, salts, lasts, max_s)
        watch = PowerWatch(local_meters(options.url or ""))
        started = time.time()
        duration = client.run(test)
        power = watch.result()
        notes |= {MEASURED: power} if power else {}
        summary = result_summary(test.records, duration, started)
        if passes:
            state = find_steady_state(passes.complete(), size, min_duration_s(c))
            summary[STEADY_STATE] = state.block() | state.figures()
        write_yaml(folder / CONFIG, notes | ({STEADY_STATE: state.block()} if state else {}))
        write_json(folder / SUMMARY, summary)
        failed = _errors(test, curve.title(c))
    write_json(folder / WARMUP, request_logs(warm_up.records))
    curve.write_point(c)
    watts = f"  {power['mean_w']:.4g} W (NVML)" if power else ""
    print(
        f"{curve.title(c):>17}  {summary['n_samples_issued']:,} requests"
        f" in {summary['duration_ns'] / 1e9:.1f} s  {rate_text(system_tps(summary))} tokens/s"
        f"{'' if curve.is_offline(c) else per_user(summary)}"
        f"{watts}",
        flush=True,
    )
    if state:
        print(f"{'':>18} {steady_state_line(state, summary['duration_ns'] / 1e9)}", flush=True)
    return failed


def _own_test(
    curve: Curve,
    c: int,
    prompts: Sequence[NDArray[np.int32]],
    order: Iterator[int],
    sampling: Sampling,
    salts: Salts,
    min_s: float,
    max_s: float,
) -> tuple[FixedConcurrency, SuperPasses | None]:
    """Return the test of a run with mpillm's client, and the super-passes that it fills; None for Offline."""
    size = len(prompts)
    if curve.is_offline(c):
        # Requests of two passes must not be in one batch (5.7.1), so a pass begins after the end of another.
        full = FullPasses(size, min_s)
        test = FixedConcurrency(prompts, order, sampling, c, goal=full, drained_after=size, salts=salts)
        return test, None
    goal = SteadyStateGoal(size, min_s, max_s)
    return FixedConcurrency(prompts, order, sampling, c, goal=goal, salts=salts), goal.passes


def steady_state_line(state: SteadyState, lasted_s: float) -> str:
    """Return a point's steady state as a line, with a way to get one if there is none."""
    seen = f"passes {state.start + 1} to {state.start + len(state.passes)}, {state.duration_s:.1f} s"
    if state.is_official:
        figures = state.figures()
        user = f", {rate_text(figures['tps_per_user'])} per user" if "tps_per_user" in figures else ""
        verdict = "" if state.verdict == "STEADY STATE" else f" ({state.verdict})"
        return f"steady state{verdict}: {seen}: {rate_text(figures['system_tps'])} tokens/s{user}"
    verdict = f", {state.verdict}" if state.verdict.startswith("drifting") else ""
    line = f"no steady state ({state.status}{verdict})"
    line += f": the longest plateau is {seen}" if state.passes else ""
    return f"{line}; the figures of all {lasted_s:.1f} s count (longer tests: --max_duration)"


def _load_of(
    options: _Options, curve: Curve, c: int, client: EndpointClient, dataset: Dataset, sampling: Sampling
) -> LoadSpec:
    """Return the load of MLCommons' client at a point. Its files remain beside the submission."""
    seeds, tokenizer = curve.seed_set.seeds, load_tokenizer(Path(options.model_path or ""))
    return LoadSpec(
        (client.endpoint.url,),
        client.endpoint.model,
        str(Path(options.model_path or "").absolute()),
        (curve.root.parent / "inference-endpoint" / f"r{c}").absolute(),
        [
            PromptSample(dataset.sample(i).tolist(), "", sampling.max_tokens, False)
            for i in range(len(dataset))
        ],
        [sampling.max_tokens] * len(dataset),
        [False] * len(dataset),
        range(len(dataset)),
        None,
        None if curve.is_offline(c) else c,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        0,
        Seeds(seeds[SAMPLES], seeds[SCHEDULER], sampling.seed),
        lambda text: len(tokenizer.encode_plain(text)),
        min_duration_ms=round(1000 * _lasts(options, c)),
        all_chunks=True,
    )


def _accuracy(
    curve: Curve,
    c: int,
    client: EndpointClient,
    dataset: Dataset,
    rows: Sequence[Row],
    workload: Workload,
) -> list[str]:
    prompts = [dataset.sample(i) for i in range(len(dataset))]
    sampling = _sampling(curve, workload)
    test = FixedConcurrency(prompts, iter(range(len(prompts))), sampling, c, len(prompts))
    client.run(test)
    if lost := _errors(test, f"{curve.title(c)}, accuracy"):
        return lost
    answers = [ScoredResponse(record.text, record.output_len) for record in test.records]
    scores = METRICS[workload.accuracy.metric](answers, [rows[i] for i in test.indices])
    write_json(curve.folder(c) / ACCURACY, accuracy_results(curve.benchmark.dataset, len(answers), scores))
    values = ", ".join(f"{name} {value:.4g}" for name, value in scores.values.items())
    print(f"{'':>18} accuracy: {values}", flush=True)
    return []


def _errors(test: FixedConcurrency, name: str) -> list[str]:
    errors = [record.error for record in test.records if record.error]
    return [f"{name}: {len(errors)} requests failed: {errors[0]}"] if errors else []


def _dataset_path(options: _Options, workload: Workload, tiny: Path) -> Path:
    if options.dataset_path:
        return Path(options.dataset_path)
    if workload.scaled:
        write_dataset(workload, tiny)
        return tiny
    return Path(workload.dataset_path)
