"""Section of the HTML report: hardware, precision, lengths, how to repeat the run, and the next step."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from disagg.errors import ConfigError
from mpillm.core_names import EMBEDDED
from mpillm.report.numbers import short
from mpillm.report.page.document import Html, escape, section
from mpillm.report.page.run_analysis import Facts
from mpillm.report.repeat import shell_line, user_options, without
from mpillm.report.run_files import RunFiles

_PRECISION = {"dtype": "dtype", "quantization": "quantization", "kv_cache_dtype": "KV cache"}
_GB = 1e9


def about_run(facts: Facts) -> str:
    """Return the section, without rows that the run directory has no data for."""
    run = facts.run
    rows: list[tuple[str, object]] = [
        ("hardware", hardware(run)),
        ("precision", precision(run)),
        ("prompts", _prompts(run.result)),
        ("answers", _answers(run)),
    ]
    options = _options(run)
    if options is not None:
        rows.append(("repeat it", _code(mpirun_line(run, options))))
        sentence, command = next_step(facts, options)
        rows.append(("next", Html(f"{escape(sentence)}{_code(command)}")))
    return section("About this run", ("", ""), [row for row in rows if row[1]])


def hardware(run: RunFiles) -> str:
    """Return the kinds of nodes: processors, memory, GPUs."""
    kinds: dict[str, list[str]] = {}
    for host, machine in run.machines.items():
        cpu, names = machine["cpu"], [str(gpu["name"]) for gpu in machine.get("gpus") or ()]
        gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "no GPU"
        memory = f"{machine['memory_bytes'] / _GB:,.0f} GB"
        kinds.setdefault(f"{cpu['model']}, {cpu['cores']} cores, {memory}, {gpus}", []).append(str(host))
    return "; ".join(
        f"{hosts[0] if len(hosts) == 1 else f'{len(hosts)} nodes'}: {kind}" for kind, hosts in kinds.items()
    )


def precision(run: RunFiles) -> str:
    """Return the types of weights and KV cache, by the options of the run."""
    core = run.value("core_type")
    if core == "dummy":
        return "none: the dummy core has no model"
    if core not in EMBEDDED and not run.value("server"):
        return "unknown: the run did not start the servers" if core else ""
    parts = [f"{name} {value}" for option, name in _PRECISION.items() if (value := run.value(option))]
    return ", ".join(parts) + (" (auto: as the checkpoint)" if any("auto" in part for part in parts) else "")


def _prompts(result: Mapping[str, Any]) -> str:
    lengths = result.get("prompt_tokens") or {}
    return f"mean {short(lengths['mean'])} tokens, at most {lengths['max']:,}" if lengths else ""


def _answers(run: RunFiles) -> str:
    samples, tokens = run.result.get("samples"), run.result.get("tokens")
    if not samples or not tokens:  # a stopped run has no count of tokens
        return ""
    max_tokens = run.value("max_output_len")
    limit = f", at most {max_tokens:,} (--max_output_len)" if max_tokens else ""
    return f"mean {short(tokens / samples)} tokens{limit}"


def _options(run: RunFiles) -> list[str] | None:
    """Return the options that the user typed; None if the run directory does not contain them."""
    with contextlib.suppress(ConfigError):
        return user_options(run.path)
    return None


def mpirun_line(run: RunFiles, options: list[str]) -> str:
    """Return the command that repeats a run."""
    ranks = run.result.get("world_size", run.plan.get("world_size", "N"))
    command = "serve" if run.result.get("status") == "SERVED" else "run"
    return _command("mpirun", "-n", str(ranks), command, *options)


def next_step(facts: Facts, options: list[str]) -> tuple[str, str]:
    """Return what to do next, as a sentence, and the command for it."""
    run, status = facts.run, str(facts.run.result.get("status") or "")
    again = _command("rerun", str(run.path))
    if status == "FAILED" and not run.stopped_by:
        return "Examine the machines:", "python -m mpillm doctor"
    if status == "SERVED":
        url = str(run.result.get("url"))
        return "Measure such a server:", _command("bench", "endpoint", "--url", url)
    if status not in ("VALID", "INVALID"):
        return "Repeat it:", again
    if any(doubt.startswith("disturbed") for doubt in run.doubts):
        return "Repeat it on a quiet machine:", again
    if status == "INVALID" and run.result.get("loadgen_result") == "VALID":
        return "Remove the cause of the refusal, then repeat it:", again
    ranks = ["-n", str(run.result.get("world_size", 2))]
    if run.result.get("scenario") == "Server":
        others = without(options, ["server_target_qps", "scenarios"])
        return "Find the highest VALID rate:", _command("find-max-qps", *ranks, *others)
    if status == "INVALID":
        return "Follow LoadGen's advice above, then repeat it:", again
    if run.result.get("mode") == "disaggregated":
        return "Find better numbers of instances:", _command("advise", *without(options, ["mode"]))
    sizes = ("--max_batch_size", "8", "16", "32")
    return "Vary an option:", _command("sweep", *ranks, *without(options, ["max_batch_size"]), *sizes)


def _command(name: str, *args: str) -> str:
    return shell_line(["python", "-m", "mpillm", name, *args])


def _code(command: str) -> Html:
    return Html(f"<pre>{escape(command)}</pre>" if command else "")
