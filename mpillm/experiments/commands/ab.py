"""``python -m mpillm ab "OPTIONS A" "OPTIONS B"``: is the difference real?"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from disagg.errors import ConfigError
from mpillm.errors import ExitCode
from mpillm.experiments import conversation_runs
from mpillm.experiments.grouped_doubts import grouped_doubts
from mpillm.experiments.intervals import MAX_PAIRS, PairedTest, pairs_needed
from mpillm.experiments.pages import ab_page
from mpillm.experiments.run_pairs import ALPHA, METRICS, judge, run_pairs
from mpillm.experiments.run_series import GROUP, RankedOptions, mpirun_args, parse_series
from mpillm.experiments.warm_cache import RepeatedPrompts
from mpillm.files import write_text
from mpillm.options.columns import indented, table
from mpillm.options.command_line import Parser
from mpillm.options.field import option
from mpillm.options.options import parse_run
from mpillm.options.parsers import positive
from mpillm.options.run_config import RunConfig
from mpillm.report.run_directory import display_path, series_folder


class Options(RankedOptions, group=GROUP):
    """Options of ``ab``."""

    pairs = option("pairs of runs, three or more", positive, default=5)
    metric = option(
        "the figure that decides [default: latency_mean for Server and SingleStream, tokens_per_second for"
        " Offline]",
        choices=METRICS,
    )


def main(argv: Sequence[str]) -> int:
    """Run the pairs, print them and the verdict."""
    parser = Parser(
        prog="mpillm ab",
        figures=True,
        usage='python -m mpillm ab "OPTIONS A" "OPTIONS B" [options] [options of both]',
        description="Run two sets of options of run alternately, on the same nodes, and say whether the"
        f" difference is real: Student's paired t test of log ratios, two-sided, at {100 * ALPHA:g} %, of one"
        " figure.",
        epilog='example:\n  python -m mpillm ab "--max_batch_size 8" "--max_batch_size 16" --pairs 5 -n 3'
        " --model_path DIR",
    )
    if {"-h", "--help"} & {*argv}:
        parse_series(argv, Options, parser)
    own = [option for field in Options.declared() for option in (f"--{field.name}", f"-{field.name}")]
    texts = argv[:2]
    if len(texts) < 2 or any(text.partition("=")[0] in own for text in texts):
        raise ConfigError('ab: expected two sets of options first: ab "OPTIONS A" "OPTIONS B" --pairs 5')
    options, both = parse_series(argv[2:], Options, parser)
    if options.pairs < 3:
        raise ConfigError(f"--pairs {options.pairs}: three or more")
    try:
        sides = {name: [*both, *shlex.split(text)] for name, text in zip("AB", texts, strict=True)}
    except ValueError as error:
        raise ConfigError(f"ab: {error}, in {texts[0]!r} or {texts[1]!r}") from None
    configs = {name: parse_run(side, parser) for name, side in sides.items()}
    if configs["A"].scenario != configs["B"].scenario:
        raise ConfigError(
            f"ab: A is scenario {configs['A'].scenario}, B is {configs['B'].scenario}: they have no figure in"
            " common"
        )
    if (ranks := mpirun_args(options, configs["A"])) != (other := mpirun_args(options, configs["B"])):
        raise ConfigError(f"ab: A would have {ranks[1]} ranks, B {other[1]}: name their number with -n")
    default = "tokens_per_second" if configs["A"].scenario == "Offline" else "latency_mean"
    metric = options.metric or default
    check_metric(metric, configs.values())
    folder = series_folder(options.log_dir, "ab").absolute()
    print(indented("A: ", texts[0]), indented("B: ", texts[1]), sep="\n")
    print(f"{options.pairs} pairs, in {display_path(folder)}", flush=True)
    repeated = RepeatedPrompts()
    pairs: list[dict[str, dict[str, float]]] = []
    doubtful: list[tuple[str, str]] = []
    try:
        for figures, doubts in run_pairs(
            *(folder, ranks, sides, configs, options.pairs, metric, repeated),
            report=lambda line: print(indented("  ", line), flush=True),
        ):
            pairs.append(figures)
            doubtful += doubts
        verdict = judge(pairs, metric)
    except BaseException:  # also Ctrl-C
        if pairs:
            options.report(_result(sides, metric, pairs, doubtful))
        raise
    rows = [["pair", "A", "B", "B/A"]]
    for number, pair in enumerate(pairs, 1):
        a, b = pair["A"][metric], pair["B"][metric]
        rows.append([str(number), f"{a:,.5g}", f"{b:,.5g}", f"{b / a:.4f}"])
    print(f"\n{metric.replace('_', ' ')}\n{table(rows)}\n\n{verdict_text(verdict, options.pairs)}")
    lines = grouped_doubts(doubtful)
    for line in lines:
        print(indented("doubtful: ", line))
    page = folder / "ab.html"
    lines += filter(None, [repeated.text])
    write_text(page, ab_page(folder, texts, metric, pairs, verdict_text(verdict, options.pairs), lines))
    print(f"\npage  {display_path(page)}")
    judged = {"verdict": asdict(verdict) | {"real": verdict.real}}
    options.report(_result(sides, metric, pairs, doubtful) | judged)
    return ExitCode.DONE


def _result(
    sides: Mapping[str, Sequence[str]],
    metric: str,
    pairs: Sequence[Mapping[str, Mapping[str, float]]],
    doubtful: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    """Return the figures for --json and --output."""
    doubts = [f"{run}: {doubt}" for run, doubt in doubtful]
    return {**sides, "metric": metric, "pairs": pairs, "doubts": doubts}


def check_metric(metric: str, configs: Iterable[RunConfig]) -> None:
    """Raise ConfigError if the runs of one side will not have this figure."""
    for config in configs if metric in conversation_runs.METRICS else ():
        if not config.has_conversations:
            raise ConfigError(f"--metric {metric} needs --harness conversations", about=["metric"])
        if metric.startswith("good_") and not config.goodput:
            raise ConfigError(f"--metric {metric} needs limits: --goodput ttft:500 tpot:50", about=["metric"])


def verdict_text(verdict: PairedTest, pairs: int) -> str:
    """Return lines on the change, the ratio with its interval, the test, and pairs needed to decide."""
    interval_name = f"{100 * (1 - ALPHA):g} % interval"
    interval = f"{100 * (verdict.low - 1):+,.2f} to {100 * (verdict.high - 1):+,.2f} %"
    head = f"B differs: {100 * (verdict.ratio - 1):+,.2f} %" if verdict.real else "no difference shown"
    lines = [
        f"{head} ({interval_name} of the change: {interval})",
        f"ratio B/A {verdict.ratio:.4f} ({interval_name}: {verdict.low:.4f} to {verdict.high:.4f})",
        f"paired t test of {pairs} log ratios: p = {verdict.p:.3g}, real below {ALPHA:g}",
    ]
    if not verdict.real:
        needed = pairs_needed(verdict, pairs)
        more = f"--pairs {needed} decides" if needed else f"even --pairs {MAX_PAIRS} does not decide"
        lines.append(f"undecided: if further pairs are like these, {more}")
    return "\n".join(lines)
