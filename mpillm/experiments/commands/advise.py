"""``python -m mpillm advise``: predict every way to use some GPUs, propose the best, and verify them."""

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
from mpillm.cores.capabilities import TellsSteps
from mpillm.cores.registry import BackendRegistry
from mpillm.errors import ExitCode
from mpillm.experiments.advise.candidates import ONE_RANK, Candidate, candidates, layouts
from mpillm.experiments.advise.planning import plan_of, prepared, world_size
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
from mpillm.report.run_directory import display_path, series_folder
from mpillm.report.run_files import RunFiles
from mpillm.runtime.whole_runs import run_in
from mpillm.telemetry.other_load import least_disturbed

if TYPE_CHECKING:
    from mpillm.experiments.advise.calibration import Calibrator
    from mpillm.experiments.advise.prediction import Prediction
    from mpillm.runtime.join import Planned, Prepared

_PROPOSED = 3
_OURS = (  # options of `run` that a proposal sets
    *("disagg_config", "num_ctx_servers", "ctx_tp_size", "ctx_pp_size", "num_gen_servers", "gen_tp_size"),
    *("gen_pp_size", "tensor_parallelism", "pipeline_parallelism", "world_size"),
)
# What the simulation does not know: a test with these is another; without those it is nearly the same.
_OTHERS = ("harness", "speculative_config", "beam_width")
_LEFT_OUT = ("enable_kv_cache_reuse", "enable_max_num_tokens_tuning")


class Options(SeriesOptions, group=GROUP):
    """Options of ``advise``."""

    total_gpus = option(
        "GPUs to use, or worker ranks where there is no GPU; control ranks come besides", positive, default=2
    )
    goodput = LoadgenFields.goodput
    verify = option(
        "run so many of the best proposals, and print the errors of the predictions"
        f" [without a number: {_PROPOSED}]",
        positive,
        argparse_opts={"nargs": "?", "const": str(_PROPOSED)},
    )
    repeats = option(
        "short runs of each kind, alternating, and runs that verify a proposal, of which the median counts:"
        " more than one where the machine's speed changes",
        positive,
        default=1,
    )


def main(argv: Sequence[str]) -> int:
    """Calibrate, predict, propose and, if asked to, verify; print all."""
    parser = Parser(
        prog="mpillm advise",
        figures=True,
        description="Propose how to use some GPUs for a test: instances, their layouts, aggregated or"
        " disaggregated, contexts to generation instances, and max_batch_size. Short runs, a minute or more,"
        " calibrate a simulation of the whole test; takes all options of run. A --mode that is given is the"
        " only one that is considered, --max_batch_size is the largest.",
        epilog="examples:\n"
        "  python -m mpillm advise --total_gpus 2 --model_path tiny-llama --max_batch_size 16 --verify\n"
        "  python -m mpillm advise --total_gpus 8 --benchmarks llama2-70b --scenarios Server"
        " --server_target_qps 20 --model_path DIR --goodput ttft:2000 tpot:200",
    )
    options, words = parse_series(argv, Options, parser)
    config = parse_run(words, parser)
    _check(config)
    for line in _left_out(config):
        print(indented("  ", line))
    ranks = options.total_gpus
    folder = series_folder(options.log_dir, "advise").absolute()
    found, test, calibrator = _plans(words, config, ranks, folder, options)
    dataset = test.dataset
    issued = issue_order(test.settings, len(dataset))
    settings = test.settings.to_json()
    limits_ms = options.goodput or {
        name: ms for name in ("ttft", "tpot") if (ms := settings.get(f"{name}_latency_ms")) is not None
    }
    folder.mkdir(parents=True, exist_ok=True)
    print(f"calibrating with short runs, in {display_path(folder)}", flush=True)
    began = time.monotonic()
    calibration = calibrator.calibrate(list(found), ranks)
    print(f"  took {time.monotonic() - began:.0f} s", flush=True)
    from mpillm.experiments.advise.prediction import Load, best, predict, with_steps_of

    most = np.full(len(dataset), config.max_output_len, np.int64)
    if dataset.output_lengths is not None:
        most = np.minimum(most, dataset.output_lengths)
    load = Load(issued, dataset.lengths(), most)
    began = time.monotonic()
    predicted = [predict(one, planned, calibration, load, limits_ms) for one, planned in found.items()]
    took = time.monotonic() - began
    print(f"{len(predicted)} ways to use {ranks} {_of(found)}s, simulated in {took:.1f} s\n")
    print(_pareto(predicted, _of(found)))
    chosen = best(predicted, max(_PROPOSED, options.verify or 0))
    print("\n" + _proposals(chosen[:_PROPOSED], words, ranks, limits_ms))
    verified, errors = [], ""
    if options.verify:
        tried = chosen[: options.verify]
        print(f"\nverifying the best {len(tried)}", flush=True)
        mpirun = ["-n", str(world_size(words, ranks)), *options.mpirun_options]

        def from_steps_of(one: Prediction, run: RunFiles) -> Prediction | None:
            then = with_steps_of(calibration, one.candidate, run)
            if then is None:
                return None
            return predict(one.candidate, found[one.candidate], then, load, limits_ms)

        def just_before(one: Prediction) -> Prediction | None:
            if not calibration.steps:
                return None
            rate = one.figures["samples_per_second"]
            return from_steps_of(one, calibrator.again(one.candidate, rate, len(issued.indices)))

        verified = _verify(folder, tried, words, mpirun, options.repeats, just_before, from_steps_of)
        errors = _errors(tried, verified)
        print("\n" + errors)
    page = folder / "advise.html"
    ways = [(_label(one.candidate), one.figures) for one in predicted]
    proposals = _proposals(chosen[:_PROPOSED], words, ranks, limits_ms)
    write_text(page, advise_page(folder, ways, _of(found), proposals, errors))
    print(f"\npage  {display_path(page)}")
    figures = {
        "calibration": calibration.to_json(),
        "predicted": [_said(one, words) for one in predicted],
        "best": [_said(one, words) for one in chosen],
        "verified": verified,
    }
    options.tell(figures)
    return ExitCode.DONE


def _check(config: RunConfig) -> None:
    """Raise ConfigError for what can't be advised on."""
    for name in _OURS:
        if config.is_user_set(name):
            raise ConfigError(f"{config.named(name)}: advise proposes it; leave it out", about=[name])
    if BackendRegistry.get(config.core_type).is_client:
        raise ConfigError(
            f"{config.named('core_type')}: its servers are started elsewhere, in a layout of their own;"
            " advise plans instances in the ranks"
        )
    core = BackendRegistry.get(config.core_type)
    if core.needs_model and not issubclass(core, TellsSteps):
        raise ConfigError(
            f"{config.named('core_type')}: it does not tell what its steps hold and take, from which advise"
            f" predicts; {DEFAULT} does"
        )
    if config.test_mode != "PerformanceOnly":
        raise ConfigError(f"{config.named('test_mode')}: advise is about performance")
    for name in _OTHERS:
        if config.values[name] not in (None, BY_NAME[name].default):
            raise ConfigError(f"{config.named(name)}: advise can't simulate it; leave it out", about=[name])


def _left_out(config: RunConfig) -> list[str]:
    """Return a line for each option that the runs have and the simulation has not."""
    names = [name for name in _LEFT_OUT if config.values[name]]
    if config.traffic_distribution_policy == "kv_cache_aware":
        names.append("traffic_distribution_policy")
    return [f"{config.named(name)}: not simulated; predictions are of runs without it" for name in names]


def _plans(
    words: Sequence[str], config: RunConfig, ranks: int, folder: Path, options: Options
) -> tuple[dict[Candidate, Planned], Prepared, Calibrator]:
    """Return the candidates that can run with their plans, the prepared test, and what calibrates.

    Raises ConfigError if none can run.
    """
    modes = [config.mode] if config.is_user_set("mode") else ["aggregated", "disaggregated"]
    plans: dict[Candidate, Planned] = {}
    refused: dict[str, str] = {}
    largest = plan_of([*words, "--mode=aggregated"], ranks).cores[0].engine.scheduler.max_batch_size
    # Without a model an instance of several ranks is no faster than one of one rank.
    allowed = layouts(ranks) if BackendRegistry.get(config.core_type).needs_model else [ONE_RANK]
    for candidate in candidates(ranks, allowed, modes, largest):
        try:
            plans[candidate] = plan_of([*words, *candidate.words()], ranks)
        except ConfigError as error:
            refused[str(candidate)] = str(error).splitlines()[0]
    for shape, why in refused.items():
        print(f"{shape}: left out: {why}")
    if not plans:
        raise ConfigError("no way to use the ranks is possible: " + "; ".join(refused.values()))
    planned = next(iter(plans.values()))

    def for_data() -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    test = prepared(planned, for_data)
    from mpillm.experiments.advise.calibration import Calibrator

    calibrator = Calibrator(
        folder,
        options.mpirun_options,
        words,
        planned.cores[0].engine.n_threads,
        largest,
        test.settings.model,
        config.user_conf,
        test.dataset.lengths().tolist(),
        options.repeats,
        lambda line: print(indented("  ", line.strip()), flush=True),
    )
    return plans, test, calibrator


def _of(found: dict[Candidate, Planned]) -> str:
    return "GPU" if next(iter(found.values())).gpus else "rank"


def _label(candidate: Candidate) -> str:
    return f"{candidate}, max_batch_size {candidate.max_batch_size}"


def _pareto(predicted: Sequence[Prediction], of: str) -> str:
    found = [one.figures for one in predicted]
    front = pareto(found)
    if not front:
        return "no Pareto curve: answers of one token have no tokens/s per user"
    return "\n".join(curve(found, front, [_label(one.candidate) for one in predicted], of))


def _command(candidate: Candidate, words: Sequence[str], ranks: int) -> str:
    n, options = world_size(words, ranks), [*without(words, ("mode", "max_batch_size")), *candidate.words()]
    line = f"python -m mpillm mpirun -n {n} run".split()
    return wrapped(map(shlex.quote, [*line, *options]), indent="   ")


def _proposals(
    chosen: Sequence[Prediction], words: Sequence[str], ranks: int, limits_ms: dict[str, Any]
) -> str:
    lines = []
    for i, one in enumerate(chosen, 1):
        figures = one.figures
        said = f"{figures['tokens_per_second']:,.4g} tokens/s, TTFT p99 {figures['ttft_p99_ms']:,.4g} ms"
        if figures["tpot_p99_ms"] is not None:
            said += f", TPOT p99 {figures['tpot_p99_ms']:,.4g} ms"
        if limits_ms:
            share = one.good_per_second / figures["samples_per_second"]
            said += f", {share:.1%} of requests within the limits"
        lines += [
            indented(f"{i}. ", f"{_label(one.candidate)}: {said}"),
            _command(one.candidate, words, ranks),
        ]
    if limits_ms:
        lines.insert(0, "limits: " + ", ".join(f"{name.upper()} {ms:g} ms" for name, ms in limits_ms.items()))
    return "\n".join(lines)


def _verify(
    folder: Path,
    tried: Sequence[Prediction],
    words: Sequence[str],
    mpirun: list[str],
    repeats: int,
    just_before: Callable[[Prediction], Prediction | None],
    from_steps_of: Callable[[Prediction, RunFiles], Prediction | None],
) -> list[dict[str, Any]]:
    """Run each `repeats` times, alternating; return the figures of that with the median throughput.

    `just_before` predicts a run anew right before it begins; `from_steps_of` simulates it with its own steps.
    """

    def measure(what: Prediction, name: str) -> tuple[Prediction | None, RunFiles]:
        again = len([*folder.glob(f"{name}*")])
        where = folder / (name + (f"-again-{again}" if again else ""))
        if (now := just_before(what)) is not None:
            first, then = (one.figures["tokens_per_second"] for one in (what, now))
            changed = f"{first:,.4g} tokens/s predicted, now {then:,.4g}"
            print(indented("  ", f"{_label(what.candidate)}: {changed}"), flush=True)
        ended = run_in(where, mpirun, [*words, *what.candidate.words()])
        return now, RunFiles.read(must_have_verdict(ended, _label(what.candidate)).folder)

    found: list[list[dict[str, Any]]] = [[] for _ in tried]
    for turn in range(1, repeats + 1):
        for i, one in enumerate(tried):
            (now, run), others = least_disturbed(partial(measure, one, f"verify-{i + 1:02d}-{turn}"))
            shown = figures(run)
            predictions = {"": one, "_just_before": now, "_from_own_steps": from_steps_of(one, run)}
            said = {}
            for name, what in predictions.items():
                tokens = what and what.figures["tokens_per_second"]
                said[f"predicted{name}"] = tokens
                said[f"error{name}"] = tokens and tokens / shown["tokens_per_second"] - 1
            last = said["error"] if now is None else said["error_just_before"]
            label = f"{i + 1}  {_label(one.candidate)}"
            verdict = f"{shown['status']}, prediction {last:+.1%}{others.said()}"
            print(indented("  ", f"{label}: {verdict}"), flush=True)
            said |= {"other_processes_cores": others.processes, "stolen_cores": others.stolen}
            found[i].append({"run": str(run.path), **said, **shown})
    return [sorted(runs, key=lambda run: float(run["tokens_per_second"]))[repeats // 2] for runs in found]


def _errors(chosen: Sequence[Prediction], verified: Sequence[dict[str, Any]]) -> str:
    """Return a table of the predictions' errors: from the calibration, from just before, from own steps."""
    names = ["tokens/s predicted", "just before", "measured"]
    names += ["error", "error just before", "error from own steps"]
    rows = [["", *names, "per user predicted", "per user measured"]]
    for i, (one, found) in enumerate(zip(chosen, verified, strict=True), 1):
        per_user = one.figures["tokens_per_second_per_user"], found["tokens_per_second_per_user"]
        speeds = found["predicted"], found["predicted_just_before"], found["tokens_per_second"]
        errors = [found[f"error{name}"] for name in ("", "_just_before", "_from_own_steps")]
        rows.append(
            [
                f"{i}.",
                *("-" if value is None else f"{value:,.4g}" for value in speeds),
                *("-" if value is None else f"{value:+.1%}" for value in errors),
                *("-" if value is None else f"{value:,.4g}" for value in per_user),
            ]
        )
    return table(rows)


def _said(one: Prediction, words: Sequence[str]) -> dict[str, Any]:
    options = shlex.join([*words, *one.candidate.words()])
    return {"options": options, **one.figures, "good_requests_per_second": one.good_per_second}
