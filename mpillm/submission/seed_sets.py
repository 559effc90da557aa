"""Seed sets and publication cohorts of MLPerf Endpoints.

Sources: MLCommons' submission rules, 4.2 (cohorts) and 4.6 (seed rotation), and `seedset.yaml` of
mlcommons/endpoints_policies. endpoints-submission-cli 1.5.3 reads the same form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, NamedTuple

from disagg.errors import ConfigError
from disagg.text_file import read_text
from disagg.yaml_text import cut, value_of
from mpillm.options.parsers import expects

SCHEDULER, SAMPLES, MODEL = "scheduler_rng_seed", "sample_index_rng_seed", "model_seed"
_SEEDS = (SCHEDULER, SAMPLES, MODEL)
_MAX_SEED = 2**64 - 1
_MAX_YEAR = 9000
_ADOPTION = 4  # cohorts in which a new submission may use a set
_COHORT = re.compile(r"(\d{4})-(\d{2})-C([01])")
_WEDNESDAY = 2
_FORM = "cohort: {cohort-id: YYYY-MM-C0, seed_sets: [{id: B, scheduler_rng_seed: …, …}]}"


class Cohort(NamedTuple):
    """A publication date: the first (C0) or the third (C1) Wednesday of a month."""

    year: int
    month: int
    ordinal: int

    @staticmethod
    def of(text: str) -> Cohort:
        """Read YYYY-MM-C0 or YYYY-MM-C1. Raises ValueError."""
        match = _COHORT.fullmatch(text)
        if match is None or not 1 <= int(match[2]) <= 12 or not 1 <= int(match[1]) <= _MAX_YEAR:
            raise ValueError(f"{cut(text)}: expected a cohort, YYYY-MM-C0 or YYYY-MM-C1")
        return Cohort(*map(int, match.groups()))

    @property
    def day(self) -> date:
        """The publication date."""
        first = date(self.year, self.month, 1)
        return first + timedelta((_WEDNESDAY - first.weekday()) % 7 + 14 * self.ordinal)

    def next(self) -> Cohort:
        """Return the following cohort."""
        if self.ordinal == 0:
            return self._replace(ordinal=1)
        year, month = (self.year + 1, 1) if self.month == 12 else (self.year, self.month + 1)
        return Cohort(year, month, 0)

    def __str__(self) -> str:
        return f"{self.year:04d}-{self.month:02d}-C{self.ordinal}"


def next_cohort(today: date) -> Cohort:
    """Return the next cohort that accepts a submission of `today`: checks end one day before."""
    cohort = Cohort(today.year, today.month, 0)
    while cohort.day <= today:
        cohort = cohort.next()
    return cohort


@dataclass(frozen=True)
class SeedSet:
    """Seeds that MLCommons published for a cohort."""

    name: str
    seeds: Mapping[str, int]
    cohorts: tuple[Cohort, ...]  # that a new submission may target; empty: the file names none

    def counts_in(self, cohort: Cohort) -> bool:
        """Return whether a new submission to a cohort may use the set. A file without cohorts allows all."""
        return not self.cohorts or cohort in self.cohorts

    def line(self, target: Cohort) -> str:
        """Return the cohorts in which a result counts, and whether the target is one of them."""
        if not self.cohorts:
            return f"{self.name}: its file names no cohort, so the target {target} cannot be checked"
        names = ", ".join(map(str, self.cohorts))
        line = f"{self.name}: a new submission counts in {names} (until {self.cohorts[-1].day})"
        if target in self.cohorts:
            return f"{line}; target {target}"
        return (
            f"{line}, but not in the target {target}. The checker rejects it; use a newer set"
            " (--seed_sets FILE) or another --target_cohort"
        )


PUBLISHED = (
    SeedSet(
        "A",
        {SCHEDULER: 10487924139932647040, SAMPLES: 586478644936801402, MODEL: 9315206023656308754},
        (Cohort(2026, 10, 1), Cohort(2026, 11, 0), Cohort(2026, 11, 1), Cohort(2026, 12, 0)),
    ),
)
"""The sets of MLCommons' `seedset.yaml` in November 2026."""


def choose(sets: Sequence[SeedSet], name: str | None, target: Cohort) -> SeedSet:
    """Return the set `name`; None: the newest that counts in the target cohort, or else the newest.

    Raises ConfigError for an unknown name.
    """
    if name is None:
        return next((one for one in reversed(sets) if one.counts_in(target)), sets[-1])
    for one in sets:
        if one.name == name:
            return one
    known = ", ".join(one.name for one in sets)
    raise ConfigError(f"--seed_set {cut(name)}: expected one of {known}; --seed_sets names a file of others")


def read_seed_sets(path: str) -> list[SeedSet]:
    """Read a file of seed sets, oldest first. Raises ConfigError."""
    where = f"--seed_sets {path}"
    raw = value_of(read_text(path, "--seed_sets "), where)
    cohort = raw.get("cohort") if isinstance(raw, dict) else None
    block = cohort if isinstance(cohort, dict) else raw  # the older form has no cohort
    entries = block.get("seed_sets") if isinstance(block, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{where}: expected {_FORM}")
    published = cohort.get("cohort-id") if isinstance(cohort, dict) else None
    common = _adoption(where, published) if published is not None else ()
    sets = [_seed_set(f"{where}: seed_sets[{i}]", entry, common) for i, entry in enumerate(entries)]
    if twice := {one.name for one in sets if sum(other.name == one.name for other in sets) > 1}:
        raise ConfigError(f"{where}: several sets are named {cut(min(twice))}")
    return sorted(sets, key=lambda one: one.cohorts[-1:])


def _adoption(where: str, published: object) -> tuple[Cohort, ...]:
    cohorts = [_cohort(where, published)]
    while len(cohorts) < _ADOPTION:
        cohorts.append(cohorts[-1].next())
    return tuple(cohorts)


def _cohort(where: str, value: object) -> Cohort:
    try:
        return Cohort.of(str(value))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _seed_set(where: str, entry: Any, common: tuple[Cohort, ...]) -> SeedSet:
    name = entry.get("id") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: expected a mapping with id, {', '.join(_SEEDS)}")
    seeds = {}
    for key in _SEEDS:
        seed = entry.get(key)
        if type(seed) is not int or not 0 <= seed <= _MAX_SEED:
            raise ConfigError(f"{where}: {key}: {cut(seed)}; expected an integer from 0 to {_MAX_SEED}")
        seeds[key] = seed
    if (named := entry.get("cohorts")) is None:
        return SeedSet(name, seeds, common)
    if not isinstance(named, list) or not named:
        raise ConfigError(f"{where}: cohorts: {cut(named)}; expected a list of cohorts")
    return SeedSet(name, seeds, tuple(sorted(_cohort(f"{where}: cohorts", one) for one in named)))


@expects("a cohort, YYYY-MM-C0 or YYYY-MM-C1")
def cohort_name(text: str) -> str:
    """Check the name of a cohort."""
    return str(Cohort.of(text))
