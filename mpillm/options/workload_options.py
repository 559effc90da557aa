"""What a workload means for options: defaults, and the tests that NVIDIA's and MLCommons' names mean."""

from __future__ import annotations

from typing import Any

from disagg.errors import ConfigError
from mpillm.options.field import Field
from mpillm.options.fields import BY_NAME, AllFields
from mpillm.options.fields.general import INTERACTIVE
from mpillm.options.found import Found, Level, Origin
from mpillm.workloads import WORKLOADS, Workload, accuracy_of, interactive_form, plain_form

_STEP_TOKENS = 8192  # TensorRT-LLM's default of max_num_tokens: fits every prompt except llama3.1-405b's


def defaults_of(workload: Workload, scenario: str, test_mode: str = "PerformanceOnly") -> dict[Field, Any]:
    """Return a workload's defaults; answers are greedy, unless it says otherwise.

    Every workload takes every scenario, as NVIDIA's harness does: submitters publish files for SingleStream,
    and for Offline of interactive forms. A run says what no round has.
    """
    longest = workload.max_output_len
    if test_mode == "AccuracyOnly":
        longest = workload.accuracy_output_len or longest
    return {
        AllFields.model_path: workload.model_path,
        AllFields.dataset_path: workload.dataset_path,
        AllFields.max_num_tokens: _STEP_TOKENS,
        AllFields.enable_chunked_context: workload.max_input_len > _STEP_TOKENS,
        AllFields.max_seq_len: workload.max_input_len + longest,
        AllFields.max_output_len: longest,
        AllFields.min_output_len: workload.min_output_len,
        AllFields.end_ids: workload.end_ids,
        AllFields.stop_words: [list(word) for word in workload.stop_words] or None,
        **dict.fromkeys(
            (AllFields.tensor_parallelism, AllFields.ctx_tp_size, AllFields.gen_tp_size),
            workload.tensor_parallelism,
        ),
        **{BY_NAME[name]: value for name, value in workload.sampling.items()},
        **{BY_NAME[name]: value for name, value in workload.loadgen.get(scenario, {}).items()},
    }


def named_test(benchmarks: Found, scenarios: Found, accuracy_target: Found) -> dict[str, Found]:
    """Return workload, scenario and accuracy target by field name, for llama2-70b-99.9 or Interactive.

    Lists, which are several tests, stay as they are. Raises ConfigError for an accuracy target that
    contradicts the name's, and for a workload without an interactive form.
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
            have = " and ".join(WORKLOADS[workload_names[0]].scenarios)
            raise ConfigError(f"{said}: {workload_names[0]} has no interactive form; it has {have}")
        workload_names = (form,)
        where = f"{scenarios.origin.where}: scenarios {INTERACTIVE}"
        scenarios = Found(("Server",), Origin(scenarios.origin.level, where))
    return {
        "benchmarks": Found(workload_names, benchmarks.origin),
        "scenarios": scenarios,
        "accuracy_target": accuracy_target,
    }
