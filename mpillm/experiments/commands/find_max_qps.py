"""``python -m mpillm find-max-qps``: the highest rate at which a Server or Interactive test is VALID."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean

from disagg.errors import ConfigError
from mpillm.errors import ExitCode
from mpillm.experiments.conversation_rate_tests import ConversationRateTests
from mpillm.experiments.grouped_doubts import kind_of
from mpillm.experiments.pages import search_page
from mpillm.experiments.rate_search import RateTrial, SearchRecord, find_max_rate, forecast
from mpillm.experiments.rate_tests import RateTests
from mpillm.experiments.run_series import GROUP, RankedOptions, mpirun_args, parse_series
from mpillm.experiments.table import figure
from mpillm.experiments.warm_cache import RepeatedPrompts
from mpillm.files import write_text
from mpillm.options.columns import indented
from mpillm.options.command_line import Parser
from mpillm.options.field import option
from mpillm.options.fields.effects import FIND_MAX_QPS
from mpillm.options.options import parse_run
from mpillm.options.parsers import fraction, seconds
from mpillm.options.run_config import RunConfig
from mpillm.report.numbers import duration
from mpillm.report.page.run_analysis import limits_ms
from mpillm.report.run_directory import display_path, series_folder
from mpillm.report.run_files import RunFiles


class Options(RankedOptions, group=GROUP):
    """Options of ``find-max-qps``."""

    tolerance = option(
        "stop when a rate is VALID and another, at most this share higher, is not", fraction, default=0.01
    )
    probe_duration = option(
        "length of the short tests [default: a tenth of --min_duration, 5 to 60 s]", seconds
    )


def parse(argv: Sequence[str]) -> tuple[Options, list[str], RunConfig]:
    """Return the command's options, the tests' arguments, and their configuration."""
    parser = Parser(
        prog="mpillm find-max-qps",
        figures=True,
        description="Find the highest rate at which a Server or Interactive test is VALID. Takes all options"
        " of run; the search begins at --server_target_qps [default: the measured capacity].",
        epilog="examples:\n"
        "  python -m mpillm find-max-qps -n 3 --benchmarks llama2-70b --scenarios Server --model_scale tiny\n"
        "  python -m mpillm find-max-qps -n 2 --core_type dummy --core_options ttft_ms:20,tpot_ms:5"
        " --min_duration 30 --goodput ttft:500 tpot:50\n"
        "  python -m mpillm find-max-qps -n 2 --harness conversations --dataset_path talks.jsonl"
        " --model_path DIR --goodput ttft:2000 tpot:50",
    )
    options, args = parse_series(argv, Options, parser)
    typed = [
        *args,
        *([] if any(word.startswith("--scenarios") for word in args) else ["--scenarios=Server"]),
    ]
    config = parse_run(typed, parser, FIND_MAX_QPS)
    if config.harness and not config.has_conversations:
        raise ConfigError(f"{config.named('harness')}: find-max-qps goes by LoadGen's verdicts")
    return options, typed, config


def main(argv: Sequence[str]) -> int:
    """Search; print each test and the result. Raises StageError if there is none."""
    options, typed, config = parse(argv)
    kind = ConversationRateTests if config.has_conversations else RateTests
    tests = kind(
        series_folder(options.log_dir, "find-max-qps").absolute(),
        mpirun_args(options, config),
        typed,
        config,
        options.probe_duration,
    )
    tests.prepare()
    record = SearchRecord(tests.folder, tests.settings)
    if tests.note:
        print(indented("", tests.note), flush=True)
    if config.server:
        note = f"each test starts {config.server.partition(':')[0]} again; start a server that loads slowly"
        print(indented("", f"{note} once, and name its address (docs/howto/operating_point.md)"), flush=True)
    try:
        return _search(options, tests, record, config.server_target_qps if _has_rate(typed) else None)
    except SystemExit:  # Ctrl-C, or another signal
        best = record.best()
        if best is not None:
            length = "" if best.full else ", by a short test only"
            text = f"{figure(best.rate, 5)} per second{length}: {display_path(Path(best.folder))}"
            print(f"\n{indented('best so far                ', text)}")
        else:
            print("\nno rate has been VALID so far")
        _leave_page(tests, record, None)
        print(
            indented("to go on: ", f"the same command with --log_dir {display_path(tests.folder)}"),
            flush=True,
        )
        raise


def _search(options: Options, tests: RateTests, record: SearchRecord, start: float | None) -> int:
    start = start or record.start or tests.start
    if start is None:
        print(f"measuring the capacity with all queries issued at the start, {tests.short_s:g} s", flush=True)
        start = tests.capacity()
        print(f"  {figure(start, 4)} answers per second", flush=True)
    record.begin(start)
    lengths = f"short tests of {tests.short_s:g} s, then full ones of {tests.full_s:g} s"
    print(indented("", f"{lengths}, in {display_path(tests.folder)}"))

    repeated = RepeatedPrompts()
    printed: set[str] = set()  # kinds of doubts: each is printed only once
    # seconds of this command's tests; True: full ones
    lasted: dict[bool, list[float]] = {False: [], True: []}

    def test(rate: float, full: bool) -> RateTrial:
        one = record.known(rate, full)
        if one is None:
            began = time.monotonic()
            one = tests.test(rate, full)
            lasted[full].append(time.monotonic() - began)
            record.add(one)
            left = forecast(record.tests, options.tolerance)
            print(_line(one, _left(left, lasted, tests)), flush=True)
        else:
            print(_line(one, "  (from before)"), flush=True)
        # A test that was stopped has no figures, but the server knows its prompts.
        result = RunFiles.read(Path(one.folder)).result if one.figures else None
        if text := repeated.warning(tests.config, result):
            print(indented(" " * 13, f"warning: {text}"), flush=True)
        for doubt in one.doubts:
            if kind_of(doubt) not in printed:
                printed.add(kind_of(doubt))
                print(indented(" " * 13, f"doubtful: {doubt}"), flush=True)
        return one

    result = find_max_rate(test, start, options.tolerance)
    best = result.best
    print(f"\nhighest VALID rate         {figure(best.rate, 5)} {tests.per_second}")
    print(f"not VALID at               {figure(result.too_high, 5)} {tests.per_second}")
    for name, value in best.figures.items():
        print(f"{name.replace('_', ' '):<26} {figure(value, 5)}")
    print(f"confirming run             {display_path(Path(best.folder))}")
    _leave_page(tests, record, result.too_high)
    figures = {
        "rate": best.rate,
        "too_high": result.too_high,
        "run": best.folder,
        "tests": [asdict(t) for t in record.tests],
    }
    options.report(figures)
    return ExitCode.DONE


def _left(left: tuple[int, int] | None, lasted: Mapping[bool, Sequence[float]], tests: RateTests) -> str:
    """Return the estimated remaining time, from the tests so far, as the end of a line."""
    if left is None or left == (0, 0):
        return ""
    # Start and end of a test take about the same time for any length.
    around = max(0.0, mean(lasted[False]) - tests.short_s) if lasted[False] else 0.0
    full_s = mean(lasted[True]) if lasted[True] else tests.full_s + around
    short_s = mean(lasted[False]) if lasted[False] else tests.short_s
    return f"  about {duration(left[0] * short_s + left[1] * full_s)} left"


def _leave_page(tests: RateTests, record: SearchRecord, too_high: float | None) -> None:
    page = tests.folder / "find-max-qps.html"
    # A test that was stopped early has no result with its limits.
    limits = next((limits_ms(RunFiles.read(Path(one.folder))) for one in record.tests if one.figures), {})
    if tests.config.has_conversations:
        limits = {**tests.limits_ms}
    write_text(page, search_page(tests.folder, record.tests, too_high, limits, tests.unit, tests.note))
    print(f"page                       {display_path(page)}", flush=True)


def _has_rate(args: Sequence[str]) -> bool:
    return any(word.partition("=")[0] == "--server_target_qps" for word in args)


def _line(trial: RateTrial, when: str = "") -> str:
    length = "full " if trial.full else "short"
    latencies = "  ".join(
        f"{name.upper()} p99 {figure(trial.figures[f'{name}_p99_ms'], 4)} ms"
        for name in ("ttft", "tpot")
        if f"{name}_p99_ms" in trial.figures
    )
    verdict = "VALID  " if trial.valid else "INVALID"
    head = f"  {figure(trial.rate, 4):>9}/s  {length}  {verdict}  "
    text = f"{latencies or 'stopped'}{'  doubtful' if trial.doubts else ''}{when}"
    return "\n".join([indented(head, text), *([indented(" " * 13, trial.why)] if trial.why else [])])
