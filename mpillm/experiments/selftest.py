"""Cases that `selftest` tries with a kind of server or a core: commands with their expected results."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import disagg
from disagg.errors import ConfigError
from launch.children import Child, end_of
from launch.own_messages import why_ended
from launch.supervisor import is_guard
from mpillm.core_names import DEFAULT
from mpillm.cores.number_of_ranks import ranks_of
from mpillm.cores.registry import BackendRegistry
from mpillm.devices import visible_gpus
from mpillm.doctor.findings import Status
from mpillm.doctor.steps import Judge, Step, must_be_named, read_result
from mpillm.errors import ExitCode
from mpillm.experiments.table import figure
from mpillm.files import read_object
from mpillm.options.options import parse_run
from mpillm.options.run_config import RunConfig
from mpillm.programs.servers.kinds import kind_of

GOOD = "All cases that can be tried here have come out as they should."
_N, _OUTPUT = 16, 16
_DATA: tuple[str, ...] = ("--dataset", "synthetic", "--num_samples", str(_N), "--input_mean", "32")
_DATA += ("--output_mean", str(_OUTPUT), "--max_output_len", str(_OUTPUT), "--min_query_count", str(_N))
_MANY = ("--min_query_count", "100000", "--save_outputs")  # a test that runs until it is disturbed
_LOOK_S = 0.2
_NO_OPTION = "--no-such-option-of-any-server"


@dataclass(frozen=True)
class CaseBuilder:
    """Builds cases that share options and a folder."""

    args: Sequence[str]  # of run, as typed
    mpirun: Sequence[str]  # options of mpirun
    folder: Path
    deadline_s: float  # of a case

    def config(self, *more: str) -> RunConfig:
        return parse_run([*_DATA, *self.args, *more])

    def step(
        self, name: str, shows: str, judge: Callable[[Path], Judge], *more: str, n: int = 0, **extra: Any
    ) -> Step:
        """Return a case: a run with `more` options on `n` ranks (0: as many as the options require)."""
        run = self.folder / name.replace(" ", "-").replace(",", "")
        n = n or ranks_of(self.config(*more))
        argv = (sys.executable, "-m", "mpillm", "mpirun", "-n", str(n), *self.mpirun, "run")
        argv = (*argv, *_DATA, *self.args, *more, "--log_dir", str(run))
        return Step(name, shows, argv, judge(run), **extra)

    @staticmethod
    def not_here(name: str, shows: str, why: str) -> Step:
        return Step(name, shows, (), lambda code, log: (Status.SKIPPED, why), why_not=why)


def cases(builder: CaseBuilder) -> list[Step]:
    """Return the cases, simple ones first. Raises ConfigError for wrong options."""
    config = builder.config()
    kind = kind_of(config.server) if config.server else None
    per = config.clients_of_a_server if kind else 1
    if not BackendRegistry.get(config.core_type).is_client:
        per = (config.tensor_parallelism or 1) * (config.pipeline_parallelism or 1)
    one, two = (disagg.ranks_for(instances * per, config.control_ranks) for instances in (1, 2))
    steps = [
        builder.step("Offline", "all prompts are answered, and nothing is doubtful", answered, n=one),
        builder.step(
            *("Server", "prompts at random times are answered", answered),
            *("--scenarios", "Server", "--server_target_qps", "2", "--min_duration", "5"),
            n=one,
        ),
    ]
    steps += _tokens(builder, config, one)
    steps += _layouts(builder, config, one, two)
    if kind is not None and kind.takes("enable_kv_cache_reuse"):
        shows = "the server's counts show an enabled prefix cache, so one enabled by mistake is noticed"
        more = ("--enable_kv_cache_reuse", "true", "--num_samples", "4", "--input_mean", "128")
        steps.append(builder.step("a prefix cache", shows, _cached, *more, n=one))
    if kind is not None:
        shows = "an option that the server does not know is named"
        wrong = (f"--server_args={_NO_OPTION}", "--load_deadline", "120")
        steps.append(builder.step("a wrong option", shows, option_named, *wrong, n=one))
    if kind is not None or per:
        steps += _losses(builder, config, one, owned=kind is not None)
    return steps


def answered(run: Path) -> Judge:
    """Return the judge of a test that must answer each prompt; its verdict does not matter."""

    def judge(code: int, log: Path) -> tuple[Status, str]:
        if not (result := read_result(run)):
            return Status.FAILURE, f"no result.json in {run}, {why_ended(code, end_of(log))}"
        if failures := result.get("failures"):
            return Status.FAILURE, f"exit code {code}: {failures[0]['cause'].splitlines()[0]}"
        n, errors = result["samples"], result["errors"]
        rate = figure(result["tokens_per_second"], 4)
        text = f"{result['status']}: {n} answers, {errors} errors, {rate} tokens/s"
        if code != ExitCode.DONE or errors or not n:
            return Status.FAILURE, f"{text}, exit code {code}"
        if counted := sum(one.get("server_generated_tokens", 0) for one in result["per_instance"]):
            text += f", by the servers' own count {counted:,.0f} tokens"
        if doubts := result.get("doubts"):
            return Status.WARNING, f"{text}; DOUBTFUL: {doubts[0]}"
        return Status.OK, text

    return judge


def _tokens(builder: CaseBuilder, config: RunConfig, ranks: int) -> list[Step]:
    """Return cases that compare greedy answers with the embedded engine's."""
    accuracy = ("--test_mode", "AccuracyOnly", "--save_outputs")
    own = builder.step("answers", "the tokens of each answer are saved", answered, *accuracy, n=ranks)
    name, shows = "the same answers", "greedy answers equal the embedded engine's"
    folder = Path(str(config.model_path or ""))
    if config.core_type == DEFAULT:
        return [own]
    if not (folder / "config.json").is_file():
        return [
            own,
            builder.not_here(name, shows, "no --model_path with a folder for the embedded engine"),
        ]
    args = ("--core_type", DEFAULT, "--model_path", str(folder), "--dtype", str(config.dtype or "auto"))
    reference = builder.folder / "reference"
    argv = (sys.executable, "-m", "mpillm", "mpirun", "-n", "2", "run", *_DATA, *args, *accuracy)
    same = _same_answers(Path(own.argv[-1]), reference)
    return [own, Step(name, shows, (*argv, "--log_dir", str(reference)), same)]


def _same_answers(run: Path, reference: Path) -> Judge:
    def judge(code: int, log: Path) -> tuple[Status, str]:
        if code != ExitCode.DONE:
            return Status.SKIPPED, f"the embedded engine could not: {why_ended(code, end_of(log))}"
        outputs, expected = _outputs(run), _outputs(reference)
        equal = sum(outputs.get(index) == tokens for index, tokens in expected.items())
        text = f"{equal} of {len(expected)} answers are equal, token by token"
        return Status.OK if equal == len(expected) == len(outputs) else Status.WARNING, text

    return judge


def _outputs(run: Path) -> dict[int, list[int]]:
    try:
        with (run / "outputs.jsonl").open(encoding="utf-8") as lines:
            return {one["index"]: one["output_tokens"] for one in map(json.loads, lines)}
    except OSError:
        return {}


def _layouts(builder: CaseBuilder, config: RunConfig, one: int, two: int) -> list[Step]:
    gpus, steps = visible_gpus(), []
    have = None if gpus is None else len(gpus)
    each = (config.tensor_parallelism or 1) * (config.pipeline_parallelism or 1)
    if config.trtllm_server_urls or config.triton_server_urls:
        return []
    kind = kind_of(config.server) if config.server else None
    tp = _smallest_tp(Path(str(config.model_path or "")))
    for name, shows, more, ranks, needs in (
        ("two instances", "prompts are distributed over two instances", (), two, 2 * each),
        (f"TP {tp}", f"a model over {tp} devices answers", ("--tensor_parallelism", str(tp)), 0, tp * each),
        ("disaggregated", "contexts move to generation instances", ("--mode", "disaggregated"), 0, 2),
    ):
        why = f"needs {needs} GPUs, there are {have}" if have is not None and needs > have else ""
        if name.startswith("TP"):
            if kind is not None and not kind.takes("tensor_parallelism"):
                why = f"{kind.short_name} does not support --tensor_parallelism"
            elif config.is_user_set("tensor_parallelism"):
                continue
            ranks = one if kind is not None else disagg.ranks_for(tp * each, config.control_ranks)
        if name == "disaggregated" and kind is not None and not kind.disagg_protocol:
            why = f"{kind.short_name}: {kind.no_disagg}"
        if why:
            steps.append(builder.not_here(name, shows, why))
        else:
            judge = _disaggregated if name == "disaggregated" and kind is not None else answered
            steps.append(builder.step(name, shows, judge, *more, n=ranks))
    return steps


def _smallest_tp(model: Path) -> int:
    """Return the smallest TP size above 1 that fits the attention heads of a folder's model; otherwise 2."""
    try:
        config = read_object(model / "config.json")
    except (ConfigError, OSError):
        return 2
    config = config.get("text_config") or config
    heads = config.get("num_attention_heads")
    groups = config.get("num_key_value_heads") or heads
    if not (isinstance(heads, int) and isinstance(groups, int) and groups > 0):
        return 2
    fits = (n for n in range(2, heads + 1) if heads % n == 0 and (groups % n == 0 or n % groups == 0))
    return next(fits, 2)


def _disaggregated(run: Path) -> Judge:
    def judge(code: int, log: Path) -> tuple[Status, str]:
        status, text = answered(run)(code, log)
        per = read_result(run).get("per_instance", ())
        n, counted = (sum(one.get(name, 0) for one in per) for name in ("handed_over", "server_transfers"))
        return status, f"{text}; {n} contexts moved, transfers by the servers' count {counted:.0f}"

    return judge


def _cached(run: Path) -> Judge:
    def judge(code: int, log: Path) -> tuple[Status, str]:
        status, text = answered(run)(code, log)
        if status is Status.FAILURE:
            return status, text
        n = sum(one.get("server_cached_tokens", 0) for one in read_result(run).get("per_instance", ()))
        if not n:
            return (
                Status.WARNING,
                "it counts no prompt tokens from its cache: one enabled by mistake is not noticed",
            )
        return Status.OK, f"{n:,.0f} prompt tokens came from its cache, by its own count"

    return judge


def option_named(run: Path) -> Judge:
    """Return the judge of a run whose server has an unknown option: mpillm or the server must refuse it."""
    by_server = must_be_named(run, _of_server, (int(ExitCode.NOT_READY),))

    def judge(code: int, log: Path) -> tuple[Status, str]:
        why = why_ended(code, end_of(log))
        if code == ExitCode.USAGE and _NO_OPTION in why:
            return Status.OK, f"named before the start, {why}"
        return by_server(code, log)

    return judge


def _losses(builder: CaseBuilder, config: RunConfig, ranks: int, *, owned: bool) -> list[Step]:
    """Return cases that kill or stop a server, or the last rank, during the test."""
    if not owned and BackendRegistry.get(config.core_type).is_client:
        return []
    target, named = ("server", _of_server) if owned else ("rank", _of_rank(ranks - 1))
    steps = []
    for number, does in ((signal.SIGKILL, "killed"), (signal.SIGSTOP, "stopped")):

        def judge(run: Path) -> Judge:
            return must_be_named(run, named, (int(ExitCode.INSTANCE_LOST),))

        name, shows = (
            f"a {target} {does}",
            f"a {target} that is {does} while it answers is named",
        )
        strike = _strike(number, builder.folder / name.replace(" ", "-"), owned, builder.deadline_s)
        more = (*_MANY, "--heartbeat_timeout", "20", "--stall_timeout", "30")
        steps.append(builder.step(name, shows, judge, *more, n=ranks, disturb=strike))
    return steps


def _of_server(failure: Mapping[str, Any]) -> bool:
    return "server 0" in failure["cause"]


def _of_rank(rank: int) -> Callable[[Mapping[str, Any]], bool]:
    return lambda failure: bool(failure["rank"] == rank)


def _strike(number: int, run: Path, owned: bool, deadline_s: float) -> Callable[[Child], str]:
    """Return a function that sends a signal to the server, or the last rank, after the first answer."""

    def strike(child: Child) -> str:
        end = time.monotonic() + deadline_s
        outputs = run / "outputs.jsonl"
        while not (outputs.exists() and outputs.stat().st_size):
            if child.process.poll() is not None or time.monotonic() > end:
                return "no answer came"
            time.sleep(_LOOK_S)
        pid = _server_of(child.process.pid) if owned else _last_rank(run)
        if pid is None:
            return "there is no such process on this host"
        os.kill(pid, number)
        return f"{signal.Signals(number).name} to process {pid}"

    return strike


def _server_of(pid: int) -> int | None:
    """Return a process of a server that the ranks of run `pid` own: its parent is the server's guard."""
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # the process has ended
            parent = process.parent()
            if parent is not None and is_guard(parent):
                return int(process.pid)
    return None


def _last_rank(run: Path) -> int | None:
    *_, last = json.loads((run / "ranks.json").read_text(encoding="utf-8"))
    return int(last["pid"]) if psutil.pid_exists(last["pid"]) else None
