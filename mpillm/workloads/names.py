"""Workload, scenario and accuracy target from the names that NVIDIA and MLCommons have for them."""

from __future__ import annotations

from disagg.errors import ConfigError
from mpillm import workloads
from mpillm.configurator import Found, Level, Origin
from mpillm.fields.general import INTERACTIVE, WORKLOADS, accuracy_of, interactive_form, plain_form


def named_test(benchmarks: Found, scenarios: Found, accuracy_target: Found) -> dict[str, Found]:
    """Return workload, scenario and accuracy target by field name, for llama2-70b-99.9 or Interactive.

    Lists, which are several tests, stay as they are. ConfigError for an accuracy target that contradicts the
    name's, and for a workload without an interactive form.
    """
    names = [accuracy_of(name) for name in benchmarks.value or ()]
    if len(names) == 1 and (target := names[0][1]) is not None:
        said = f"benchmarks {benchmarks.value[0]}"
        if accuracy_target.origin.level >= Level.CONTEXT and accuracy_target.value != target:
            raise ConfigError(
                f"{said} ({benchmarks.origin.where}) means accuracy_target {target}, "
                f"but that is {accuracy_target.value} ({accuracy_target.origin.where})"
            )
        accuracy_target = Found(target, Origin(benchmarks.origin.level, f"{benchmarks.origin.where}: {said}"))
    workload_names = tuple(name for name, _ in names) or None
    if scenarios.value == (INTERACTIVE,) and len(names) <= 1:
        said = f"scenarios {INTERACTIVE} ({scenarios.origin.where})"
        forms = {name: interactive_form(name) for name in WORKLOADS if plain_form(name) == name}
        if workload_names is None:
            have = ", ".join(name for name, form in forms.items() if form)
            raise ConfigError(f"{said} is a form of a workload: name one with --benchmarks ({have})")
        if (form := interactive_form(workload_names[0])) is None:
            have = " and ".join(workloads.get(workload_names[0]).scenarios)
            raise ConfigError(f"{said}: {workload_names[0]} has no interactive form; it has {have}")
        workload_names = (form,)
        where = f"{scenarios.origin.where}: scenarios {INTERACTIVE}"
        scenarios = Found(("Server",), Origin(scenarios.origin.level, where))
    return {
        "benchmarks": Found(workload_names, benchmarks.origin),
        "scenarios": scenarios,
        "accuracy_target": accuracy_target,
    }
