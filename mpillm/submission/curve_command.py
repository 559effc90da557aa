"""Common parts of the commands that measure a curve for MLPerf Endpoints."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from mpillm.errors import ExitCode
from mpillm.files import as_written, read_object, write_json
from mpillm.options.field import option
from mpillm.options.fields.general import GeneralFields
from mpillm.options.fields.results import OutputFields
from mpillm.options.parsers import integers, one_of, positive, seconds
from mpillm.options.values import Values
from mpillm.report.run_directory import display_path
from mpillm.submission.client_form import CONFIG, SUMMARY
from mpillm.submission.endpoint_points import C_MIN, POWER, Curve, read_measurement, write_shared
from mpillm.submission.endpoint_rules import (
    DIVISIONS,
    MAX_POINTS,
    MIN_POINTS,
    ULTRA_LOW,
    Regions,
    default_points,
)
from mpillm.submission.power import draft_line, is_draft, is_local, power_draft
from mpillm.submission.rules import folder_name
from mpillm.submission.seed_sets import (
    PUBLISHED,
    Cohort,
    choose,
    cohort_name,
    next_cohort,
    read_seed_sets,
)
from mpillm.workloads.workload import Endpoints

GROUP = "submission"
SERVED_MODEL, SEEDS = "served_model", "seeds"
"""Keys in a point's notes."""

_REMEDY = "remove it, or choose another --submission_id"


class CurveOptions(Values, group=GROUP):
    """Options of both commands."""

    url = option("the server: host:port, or a URL of http or https")
    max_supported_concurrency = option("the highest concurrency of the curve", positive)
    concurrency = option(
        "the points, with commas between them [default: seven, evenly on a log scale]", integers
    )
    c_min_override = option(
        "the end of the region of lowest concurrency, one of the points [default: the lowest point]", positive
    )
    submitter = OutputFields.submitter.but("your organisation, and its folder's name", group=GROUP)
    system_name = GeneralFields.system_name.but("the system's name, and its folder's", group=GROUP)
    submission_id = option("the folder below the submitter's", default="1")
    division = option("the division", one_of(*DIVISIONS), default=DIVISIONS[0])
    system_description = option("a JSON file with the fields of system_desc.json about the hardware")
    system_power = option("a JSON file with the system's power, system_power.json")
    disclosure = option("a JSON file with more fields for each point.yaml, and under r8 for concurrency 8")
    src = option("a folder with the implementation's code and its README.md")
    docs = option("a folder with documents")
    seed_sets = option(
        "a file of seed sets that MLCommons published later, like seedset.yaml [default: set A]"
    )
    seed_set = option("the set of seeds [default: the newest that counts in the target cohort]")
    target_cohort = option("YYYY-MM-C0 or C1 [default: the next one]", cohort_name)
    output = OutputFields.output.but("the folder that the submission is made in", group=GROUP)
    ready_deadline = option("longest time until the server is ready", seconds, default=60.0)


def need(options: CurveOptions, command: str, *names: str) -> None:
    """Raise ConfigError if one of these options, or one that each curve needs, has no value."""
    every = ("url", "max_supported_concurrency", "submitter", "system_name", "output", *names)
    if missing := [name for name in every if not options.values[name]]:
        raise ConfigError(f"{command} needs --{', --'.join(missing)}")


def points_of(options: CurveOptions) -> list[int]:
    """Return the concurrencies of the points. Raises ConfigError."""
    c_max = options.max_supported_concurrency or 0
    points = sorted({*(options.concurrency or default_points(c_max))})
    if points[-1] != c_max:
        raise ConfigError(
            f"--concurrency: the highest is {points[-1]}; must be {c_max}, --max_supported_concurrency"
        )
    return points


def make_curve(
    options: CurveOptions,
    benchmark: Endpoints,
    n_samples: int,
    *,
    offline_run: bool = False,
    agentic: bool = False,
) -> Curve:
    """Return the curve of the options, and print what it lacks. Raises ConfigError."""
    points, c_max = points_of(options), options.max_supported_concurrency or 0
    files = {
        option: read_object(Path(file)) if (file := options.values[option]) else {}
        for option in ("system_description", "disclosure")
    }
    c_min = _c_min(options, points, files["system_description"])
    regions = Regions.of(c_max, c_min or points[0])
    for line in regions.uncovered(points):
        print(line)
    if (n_runs := len(points) + offline_run) > MAX_POINTS:
        raise ConfigError(f"--concurrency: {n_runs} points; {MAX_POINTS} are the most")
    if len(points) < MIN_POINTS:
        print(f"{len(points)} points: a submission needs {MIN_POINTS}")
    cohort = Cohort.of(options.target_cohort) if options.target_cohort else next_cohort(date.today())
    sets = read_seed_sets(options.seed_sets) if options.seed_sets else PUBLISHED
    return Curve(
        Path(options.output or ""),
        points,
        folder_name("submitter", options.submitter),
        folder_name("submission_id", options.submission_id),
        folder_name("system_name", options.system_name),
        options.division,
        benchmark,
        c_max,
        regions,
        choose(sets, options.seed_set, cohort),
        str(cohort),
        n_samples,
        files["system_description"],
        files["disclosure"],
        offline_run,
        c_min,
        agentic,
    )


def _c_min(options: CurveOptions, points: Sequence[int], description: Mapping[str, Any]) -> int | None:
    """Return the stated end of the region of lowest concurrency (5.4); None: the lowest point."""
    described, c_min = description.get(C_MIN), options.c_min_override
    if described is not None and type(described) is not int:
        raise ConfigError(f"--system_description: {C_MIN}: {described!r}; expected a whole number")
    if None not in (described, c_min) and described != c_min:
        raise ConfigError(f"--{C_MIN} {c_min}: --system_description has {described}; remove one of the two")
    c_min = described if c_min is None else c_min
    if c_min is not None and not (1 <= c_min <= ULTRA_LOW and c_min in points):
        expected = ", ".join(str(c) for c in points if c <= ULTRA_LOW) or "a point of 1 to 32"
        raise ConfigError(f"--{C_MIN} {c_min}: must be a point of the curve up to {ULTRA_LOW}: {expected}")
    return c_min


def print_seed_set(curve: Curve) -> None:
    """Print the cohorts in which a result counts."""
    print(f"seed set    {curve.seed_set.line(Cohort.of(curve.target_cohort))}")


def is_measured(folder: Path) -> bool:
    """Return whether a point has a result without failed requests."""
    file = folder / SUMMARY
    with as_written(file):
        return file.exists() and not read_object(file)["n_samples_failed"]


def check_point(curve: Curve, folder: Path, config: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raise ConfigError if a point in the folder was measured with other options than the present ones.

    `config`: the options of its measurement.
    """
    for name, value in (dict(present) | {"seed_set": curve.seed_set.name}).items():
        if (earlier := config.get(name)) != value:
            option = f"without --{name}" if earlier is None else f"with --{name} {earlier}"
            this = "without" if value is None else value
            raise ConfigError(f"{folder} was measured {option}, this is {this}: {_REMEDY}")
    if (seeds := config.get(SEEDS, curve.seed_set.seeds)) != curve.seed_set.seeds:
        of_set = f"other seeds of set {curve.seed_set.name}"
        raise ConfigError(f"{folder} was measured with {of_set}: {seeds}: {_REMEDY}")


def measured_points(curve: Curve) -> dict[int, dict[str, Any]]:
    """Return the options with which the points in the folder were measured.

    Raises ConfigError if one is not part of the curve.
    """
    points = {}
    for file in sorted(curve.folder(1).parent.glob(f"r[0-9]*/{CONFIG}")):
        c = int(file.parent.name[1:])
        if c not in curve.runs:
            raise ConfigError(
                f"{file.parent} is not a point of this curve (--concurrency, --offline): {_REMEDY}"
            )
        points[c] = read_measurement(file.parent)
    return points


def refuse(folder: Path, why: str) -> ConfigError:
    """Return the error for a point in the folder that cannot be part of the curve."""
    return ConfigError(f"{folder} {why}: {_REMEDY}")


def finish(options: CurveOptions, curve: Curve, readme: str) -> None:
    """Write the files of the submission that depend on all points. Print its place, and missing parts."""
    curve.finish()
    root = curve.root
    write_shared(root, _folder(options.src), _folder(options.docs), readme)
    draft = _write_power(options, root / "results" / curve.system / POWER, curve)
    checker = f"endpoints-submission-cli check-submission {root}"
    if options.seed_sets:  # the command has no option for the file
        checker = f"MLPERF_ENDPOINTS_SEED_SETS={shlex.quote(options.seed_sets)} {checker}"
    print(f"\nsubmission  {display_path(root)}\ncheck it    {checker}")
    if violation := curve.offline_violation():
        print(f"flagged     {violation}")
    for line in curve.missing_disclosures((root / "results" / curve.system / POWER).exists()):
        print(f"yours       {line}")
    if draft:
        print(f"yours       {draft_line(draft)}")


def _write_power(options: CurveOptions, file: Path, curve: Curve) -> dict[str, Any] | None:
    """Write the submitter's power description, or else a draft, which is returned.

    Only the Standardized division requires the file, and a draft has errors for the checker.
    """
    if options.system_power:
        write_json(file, read_object(Path(options.system_power)))
        return None
    if curve.division != "Standardized" or not is_local(options.url or ""):
        if file.exists() and is_draft(file):
            file.unlink()
        return None
    if file.exists() and not is_draft(file):
        return None
    if draft := power_draft(curve.system, curve.system_description):
        write_json(file, draft)
    return draft


def exit_code(failed: Sequence[str]) -> int:
    """Print failures, and return the exit code."""
    for line in failed:
        print(f"mpillm: {line}", file=sys.stderr)
    return ExitCode.TEST_FAILED if failed else ExitCode.DONE


def _folder(text: str | None) -> Path | None:
    if text is None:
        return None
    if not Path(text).is_dir():
        raise ConfigError(f"{text}: no such folder")
    return Path(text)
