"""The options of stages: commands before a run or a server, each of which may be for several tests."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from launch.launcher import find_launcher
from mpillm.options import layers
from mpillm.options.command_line import Parser, add_fields
from mpillm.options.field import Field
from mpillm.options.fields import AllFields
from mpillm.options.found import Level
from mpillm.options.idle import idle_in_all, told
from mpillm.options.options import parse, with_all
from mpillm.options.run_config import RunConfig


def parse_stage(
    argv: Sequence[str], parser: Parser, shown: Sequence[Field], defaults: Mapping[Field, Any] | None = None
) -> RunConfig:
    """As `parse`, for a stage before a run or a server; tell of options that no command after it uses."""
    config = parse(argv, parser, shown, defaults)
    tell_idle([config])
    return config


def tell_idle(configs: Sequence[RunConfig]) -> None:
    """Tell, on one rank, of options without effect in all commands after a stage, for each of its tests."""
    launcher = find_launcher()
    if launcher is None or launcher.first:
        for line in told(idle_in_all(configs, "stage")):
            print(f"mpillm: note: {line}", file=sys.stderr)


def parse_each(argv: Sequence[str], parser: Parser, shown: Sequence[Field]) -> list[RunConfig]:
    """As `parse`, for every pair of a workload and a scenario: lists of them mean several tests."""
    known = with_all(shown)
    add_fields(parser, known, shown)
    options = parser.texts(argv)
    made = []
    for benchmark in layers.found_for(layers.of_the_user(options, None), AllFields.benchmarks).value or (
        None,
    ):
        named = options if benchmark is None else {**options, "benchmarks": benchmark}
        scenarios = layers.found_for(layers.of_the_user(named, None), AllFields.scenarios)
        if scenarios.origin.level < Level.WORKLOAD:  # the workload's, if it has none but Server
            made.append(RunConfig.resolved(layers.stated_values(named, known, None)))
        else:
            made += [
                RunConfig.resolved(layers.stated_values({**named, "scenarios": scenario}, known, None))
                for scenario in scenarios.value
            ]
    return made
