"""``python -m mpillm advise``: predict all ways to use some GPUs, propose the best, and verify them."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from disagg.errors import ConfigError
from launch.command import wrapped
from mpillm.core_names import DEFAULT
from mpillm.cores.capabilities import RecordsSteps
from mpillm.cores.registry import BackendRegistry
from mpillm.errors import ExitCode
from mpillm.experiments.advise.candidates import ONE_RANK, Candidate, candidates, layouts
from mpillm.experiments.advise.planning import plan_of, world_size
from mpillm.experiments.option_grid import curve, figures, pareto
from mpillm.experiments.pages import advise_page
from mpillm.experiments.run_series import GROUP, SeriesOptions, must_have_verdict, parse_series
from mpillm.files import write_text
from mpillm.loadgen.issue_order import issue_order
from mpillm.options.columns import indented, table
from mpillm.options.command_line import Parser
from mpillm.options.field import option
from mpillm.options.fields import BY_NAME
from mpillm.options.fields.loadgen import LoadgenFields
from mpillm.options.options import parse_run, without
from mpillm.options.parsers import positive
from mpillm.options.run_config import RunConfig
from mpillm.report.numbers import rate_text
from mpillm.report.run_directory import display_path, series_folder
from mpillm.report.run_files import RunFiles
from mpillm.runtime.whole_runs import run_in
from mpillm.telemetry.other_load import measure_undisturbed

if TYPE_CHECKING:
    from mpillm.experiments.advise.calibration import Calibrator
    from mpillm.experiments.advise.prediction import Prediction
    from mpillm.runtime.join import RunPlan, RunSetup

_PROPOSED = 3
_PROPOSED_OPTIONS = (  # options of `run` that a proposal sets
    *("disagg_config", "num_ctx_servers", "ctx_tp_size", "ctx_pp_size", "num_gen_servers", "gen_tp_size"),
    *("gen_pp_size", "tensor_parallelism", "pipeline_parallelism", "world_size"),
)
# Options that are not simulated: they change a test's figures a lot, or hardly at all.
_UNSUPPORTED = ("harness", "speculative_config", "beam_width")
_LEFT_OUT = ("enable_kv_cache_reuse", "enable_max_num_tokens_tuning")


class Options(SeriesOptions, group=GROUP):
    """Options of ``advise``."""

    total_gpus = option(
        "GPUs to use, or worker ranks without GPUs; control ranks are additional", positive, default=2
    )
    goodput = LoadgenFields.goodput
    verify = option(
        "run this many of the best proposals, and print the errors of the predictions"
        f" [without a number: {_PROPOSED}]",
        positive,
        argparse_opts={"nargs": "?", "const": str(_PROPOSED)},
    )
    repeats = option(
        "short runs of each kind, all of which count, and runs that verify a proposal, of which the one with"
        " median throughput counts. Use more than one if the machine's speed changes",
        positive,
        default=1,
    )


def main(argv: Sequence[str]) -> int:
    """Calibrate, predict, propose and, with --verify, verify; print all."""
    parser = Parser(
        prog="mpillm advise",
        figures=True,
        description="Propose how to use some GPUs for a test: instances, their layouts, aggregated or"
        " disaggregated, contexts to generation instances, and max_batch_size. Short runs, a minute or more,"
        " calibrate a simulation of the whole test. Takes all options of run. With --mode, only this mode is"
        " considered. --max_batch_size is the maximum.",
        epilog="examples:\n"
        "  python -m mpillm advise --total_gpus 2 --model_path tiny-llama --max_batch_size 16 --verify\n"
        "  python -m mpillm advise --total_gpus 8 --benchmarks llama2-70b --scenarios Server"
        " --server_target_qps 20 --model_path DIR --goodput ttft:2000 tpot:200",
    )
    options, args = parse_series(argv, Options, parser)
    config = parse_run(args, parser)
    _check(config)
    for line in _left_out(config):
        print(indented("  ", line))
    ranks = options.total_gpus
    folder = series_folder(options.log_dir, "advise").absolute()
    plans, test, calibrator = _plans(args, config, ranks, folder, options)
    dataset = test.dataset
    issued = issue_order(test.settings, len(dataset))
    settings = test.settings.to_json()
    limits_ms = options.goodput or {
        name: ms for name in ("ttft", "tpot") if (ms := settings.get(f"{name}_latency_ms")) is not None
    }
    folder.mkdir(parents=True, exist_ok=True)
    print(f"calibrating with short runs, in {display_path(folder)}", flush=True)
    began = time.monotonic()
    calibration = calibrator.calibrate(list(plans), ranks)
    print(f"  took {time.monotonic() - began:.0f} s", flush=True)
    from mpillm.experiments.advise.prediction import Load, best, predict, with_steps_of

    max_output = np.full(len(dataset), config.max_output_len, np.int64)
    if dataset.output_lengths is not None:
        max_output = np.minimum(max_output, dataset.output_lengths)
    load = Load(issued, dataset.n_tokens, max_output)
    began = time.monotonic()
    predicted = [predict(one, planned, calibration, load, limits_ms) for one, planned in plans.items()]
    took = time.monotonic() - began
    print(f"{len(predicted)} ways to use {ranks} {_of(plans)}s, simulated in {took:.1f} s\n")
    print(_pareto(predicted, _of(plans)))
    chosen = best(predicted, max(_PROPOSED, options.verify or 0))
    print("\n" + _proposals(chosen[:_PROPOSED], args, ranks, limits_ms))
    verified, errors = [], ""
    if options.verify:
        tried = chosen[: options.verify]
        print(f"\nverifying the best {len(tried)}", flush=True)
        mpirun = ["-n", str(world_size(args, ranks)), *options.mpirun_options]

        def from_steps_of(one: Prediction, run: RunFiles) -> Prediction | None:
            then = with_steps_of(calibration, one.candidate, run)
            if then is None:
                return None
            return predict(one.candidate, plans[one.candidate], then, load, limits_ms)

        def just_before(one: Prediction) -> Prediction | None:
            if not calibration.steps:
                return None
            rate = one.figures["samples_per_second"]
            return from_steps_of(one, calibrator.again(one.candidate, rate, len(issued.indices)))

        verified = _verify(folder, tried, args, mpirun, options.repeats, just_before, from_steps_of)
        errors = _errors(tried, verified)
        print("\n" + errors)
    page = folder / "advise.html"
    labeled = [(_label(one.candidate), one.figures) for one in predicted]
    proposals = _proposals(chosen[:_PROPOSED], args, ranks, limits_ms)
    write_text(page, advise_page(folder, labeled, _of(plans), proposals, errors))
    print(f"\npage  {display_path(page)}")
    figures = {
        "calibration": calibration.to_json(),
        "predicted": [_to_json(one, args) for one in predicted],
        "best": [_to_json(one, args) for one in chosen],
        "verified": verified,
    }
    options.report(figures)
    return ExitCode.DONE


def _check(config: RunConfig) -> None:
    """Raise ConfigError for options that advise does not support."""
    for name in _PROPOSED_OPTIONS:
        if config.is_user_set(name):
            raise ConfigError(f"{config.named(name)}: advise proposes it; leave it out", about=[name])
    if BackendRegistry.get(config.core_type).is_client:
        raise ConfigError(
            f"{config.named('core_type')}: its servers have their own layout; advise only plans"
            " instances in the ranks"
        )
    core = BackendRegistry.get(config.core_type)
    if core.needs_model and not issubclass(core, RecordsSteps):
        raise ConfigError(
            f"{config.named('core_type')}: it does not report the contents and times of its steps, which"
            f" advise needs; use {DEFAULT}"
        )
    if config.test_mode != "PerformanceOnly":
        raise ConfigError(f"{config.named('test_mode')}: advise only supports performance tests")
    for name in _UNSUPPORTED:
        if config.values[name] not in (None, BY_NAME[name].default):
            raise ConfigError(f"{config.named(name)}: advise cannot simulate it; leave it out", about=[name])


def _left_out(config: RunConfig) -> list[str]:
    """Return a line for each option of the runs that is not simulated."""
    names = [name for name in _LEFT_OUT if config.values[name]]
    if config.traffic_distribution_policy == "kv_cache_aware":
        names.append("traffic_distribution_policy")
    return [f"{config.named(name)}: not simulated; predictions are of runs without it" for name in names]


def _plans(
    args: Sequence[str], config: RunConfig, ranks: int, folder: Path, options: Options
) -> tuple[dict[Candidate, RunPlan], RunSetup, Calibrator]:
    """Return the feasible candidates with their plans, the prepared test, and the calibrator.

    Raises ConfigError if no candidate is feasible.
    """
    modes = [config.mode] if config.is_user_set("mode") else ["aggregated", "disaggregated"]
    plans: dict[Candidate, RunPlan] = {}
    refused: dict[str, str] = {}
    largest = plan_of([*args, "--mode=aggregated"], ranks).cores[0].engine.scheduler.max_batch_size
    # Without a model, several ranks do not make an instance faster.
    allowed = layouts(ranks) if BackendRegistry.get(config.core_type).needs_model else [ONE_RANK]
    for candidate in candidates(ranks, allowed, modes, largest):
        try:
            plans[candidate] = plan_of([*args, *candidate.args()], ranks)
        except ConfigError as error:
            refused[str(candidate)] = str(error).splitlines()[0]
    for shape, why in refused.items():
        print(f"{shape}: left out: {why}")
    if not plans:
        raise ConfigError("no way to use the ranks is possible: " + "; ".join(refused.values()))
    planned = next(iter(plans.values()))

    def make_folder() -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    from mpillm.experiments.advise.calibration import Calibrator
    from mpillm.runtime.join import prepare

    test = prepare(planned, make_folder)

    calibrator = Calibrator(
        folder,
        options.mpirun_options,
        args,
        planned.cores[0].engine.n_threads,
        largest,
        test.settings.model,
        config.user_conf,
        test.dataset.n_tokens.tolist(),
        options.repeats,
        lambda line: print(indented("  ", line.strip()), flush=True),
    )
    return plans, test, calibrator


def _of(plans: dict[Candidate, RunPlan]) -> str:
    return "GPU" if next(iter(plans.values())).gpus else "rank"


def _label(candidate: Candidate) -> str:
    return f"{candidate}, max_batch_size {candidate.max_batch_size}"


def _pareto(predicted: Sequence[Prediction], of: str) -> str:
    points = [one.figures for one in predicted]
    front = pareto(points)
    if not front:
        return "no Pareto curve: answers of one token have no tokens/s per user"
    return "\n".join(curve(points, front, [_label(one.candidate) for one in predicted], of))


def _command(candidate: Candidate, args: Sequence[str], ranks: int) -> str:
    n, options = world_size(args, ranks), [*without(args, ("mode", "max_batch_size")), *candidate.args()]
    line = f"python -m mpillm mpirun -n {n} run".split()
    return wrapped(map(shlex.quote, [*line, *options]), indent="   ")


def _proposals(
    chosen: Sequence[Prediction], args: Sequence[str], ranks: int, limits_ms: dict[str, Any]
) -> str:
    lines = []
    for i, one in enumerate(chosen, 1):
        figures = one.figures
        text = f"{rate_text(figures['tokens_per_second'])} tokens/s"
        text += f", TTFT p99 {rate_text(figures['ttft_p99_ms'])} ms"
        if figures["tpot_p99_ms"] is not None:
            text += f", TPOT p99 {rate_text(figures['tpot_p99_ms'])} ms"
        if limits_ms:
            share = one.good_per_second / figures["samples_per_second"]
            text += f", {share:.1%} of requests within the limits"
        lines += [
            indented(f"{i}. ", f"{_label(one.candidate)}: {text}"),
            _command(one.candidate, args, ranks),
        ]
    if limits_ms:
        lines.insert(0, "limits: " + ", ".join(f"{name.upper()} {ms:g} ms" for name, ms in limits_ms.items()))
    return "\n".join(lines)


def _verify(
    folder: Path,
    tried: Sequence[Prediction],
    args: Sequence[str],
    mpirun: list[str],
    repeats: int,
    just_before: Callable[[Prediction], Prediction | None],
    from_steps_of: Callable[[Prediction, RunFiles], Prediction | None],
) -> list[dict[str, Any]]:
    """Run each proposal `repeats` times, alternating; return the figures of the runs with median throughput.

    `just_before`: predicts a run again directly before it. `from_steps_of`: simulates it with its own steps.
    """

    def measure(prediction: Prediction, name: str) -> tuple[Prediction | None, RunFiles]:
        again = len([*folder.glob(f"{name}*")])
        where = folder / (name + (f"-again-{again}" if again else ""))
        label = _label(prediction.candidate)
        if (now := just_before(prediction)) is not None:
            first, then = (one.figures["tokens_per_second"] for one in (prediction, now))
            print(
                indented("  ", f"{label}: {rate_text(first)} tokens/s predicted, now {rate_text(then)}"),
                flush=True,
            )
        ended = run_in(where, mpirun, [*args, *prediction.candidate.args()])
        return now, RunFiles.read(must_have_verdict(ended, label).folder)

    rows: list[list[dict[str, Any]]] = [[] for _ in tried]
    for turn in range(1, repeats + 1):
        for i, one in enumerate(tried):
            (now, run), others = measure_undisturbed(partial(measure, one, f"verify-{i + 1:02d}-{turn}"))
            measured = figures(run)
            predictions = {"": one, "_just_before": now, "_from_own_steps": from_steps_of(one, run)}
            row = {}
            for name, prediction in predictions.items():
                tokens = prediction and prediction.figures["tokens_per_second"]
                row[f"predicted{name}"] = tokens
                row[f"error{name}"] = tokens and tokens / measured["tokens_per_second"] - 1
            last = row["error"] if now is None else row["error_just_before"]
            label = f"{i + 1}  {_label(one.candidate)}"
            verdict = f"{measured['status']}, prediction {last:+.1%}{others.note()}"
            print(indented("  ", f"{label}: {verdict}"), flush=True)
            row |= {"other_processes_cores": others.processes, "stolen_cores": others.stolen}
            rows[i].append({"run": str(run.path), **row, **measured})
    return [sorted(runs, key=lambda run: float(run["tokens_per_second"]))[repeats // 2] for runs in rows]


def _errors(chosen: Sequence[Prediction], verified: Sequence[dict[str, Any]]) -> str:
    """Return a table of the errors of predictions from the calibration, just before, and from own steps."""
    names = ["tokens/s predicted", "just before", "measured"]
    names += ["error", "error just before", "error from own steps"]
    rows = [["", *names, "per user predicted", "per user measured"]]
    for i, (one, run) in enumerate(zip(chosen, verified, strict=True), 1):
        per_user = one.figures["tokens_per_second_per_user"], run["tokens_per_second_per_user"]
        speeds = run["predicted"], run["predicted_just_before"], run["tokens_per_second"]
        errors = [run[f"error{name}"] for name in ("", "_just_before", "_from_own_steps")]
        rows.append(
            [
                f"{i}.",
                *("-" if value is None else rate_text(value) for value in speeds),
                *("-" if value is None else f"{value:+.1%}" for value in errors),
                *("-" if value is None else rate_text(value) for value in per_user),
            ]
        )
    return table(rows)


def _to_json(one: Prediction, args: Sequence[str]) -> dict[str, Any]:
    options = shlex.join([*args, *one.candidate.args()])
    return {"options": options, **one.figures, "good_requests_per_second": one.good_per_second}
