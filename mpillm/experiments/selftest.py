"""What `selftest` tries with a kind of server or a core: cases, each a command, and what is to come of it."""

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
_MANY = ("--min_query_count", "100000", "--save_outputs")  # a test that lasts until it is disturbed
_LOOK_S = 0.2


@dataclass(frozen=True)
class Tried:
    """What is tried, and where."""

    words: Sequence[str]  # of run, as the user types them
    mpirun: Sequence[str]  # options of mpirun
    folder: Path
    deadline_s: float  # of a case

    def config(self, *more: str) -> RunConfig:
        return parse_run([*_DATA, *self.words, *more])

    def step(
        self, name: str, shows: str, judge: Callable[[Path], Judge], *more: str, n: int = 0, **rest: Any
    ) -> Step:
        """Return a case that is a run with `more` options on `n` ranks (0: as many as they name)."""
        run = self.folder / name.replace(" ", "-").replace(",", "")
        n = n or ranks_of(self.config(*more))
        words = (sys.executable, "-m", "mpillm", "mpirun", "-n", str(n), *self.mpirun, "run")
        words = (*words, *_DATA, *self.words, *more, "--log_dir", str(run))
        return Step(name, shows, words, judge(run), **rest)

    @staticmethod
    def not_here(name: str, shows: str, why: str) -> Step:
        return Step(name, shows, (), lambda code, log: (Status.SKIPPED, why), why_not=why)


def cases(tried: Tried) -> list[Step]:
    """Return the cases, simple ones first. Raises ConfigError for wrong options."""
    config = tried.config()
    kind = kind_of(config.server) if config.server else None
    per = config.clients_of_a_server if kind else 1
    if not BackendRegistry.get(config.core_type).is_client:
        per = (config.tensor_parallelism or 1) * (config.pipeline_parallelism or 1)
    one, two = (disagg.ranks_for(instances * per, config.control_ranks) for instances in (1, 2))
    found = [
        tried.step("Offline", "all prompts at once are answered, and nothing is doubtful", answered, n=one),
        tried.step(
            *("Server", "prompts at random times are answered", answered),
            *("--scenarios", "Server", "--server_target_qps", "2", "--min_duration", "5"),
            n=one,
        ),
    ]
    found += _tokens(tried, config, one)
    found += _layouts(tried, config, one, two)
    if kind is not None and kind.takes("enable_kv_cache_reuse"):
        shows = "a prefix cache that is on shows in the server's counts, so that one on by mistake is noticed"
        more = ("--enable_kv_cache_reuse", "true", "--num_samples", "4", "--input_mean", "128")
        found.append(tried.step("a prefix cache", shows, _cached, *more, n=one))
    if kind is not None:
        shows = "a server with an option that it does not know is named, with the end of its log"
        wrong = ("--server_args=--no-such-option-of-any-server", "--load_deadline", "120")
        codes = (int(ExitCode.NOT_READY),)
        found.append(
            tried.step(
                "a wrong option", shows, lambda run: must_be_named(run, _of_server, codes), *wrong, n=one
            )
        )
    if kind is not None or per:
        found += _losses(tried, config, one, owned=kind is not None)
    return found


def answered(run: Path) -> Judge:
    """Return the judge of a test in which each prompt is to be answered, whatever its size makes of it."""

    def judge(code: int, log: Path) -> tuple[Status, str]:
        if not (result := read_result(run)):
            return Status.FAILURE, f"no result.json in {run}, {why_ended(code, end_of(log))}"
        if failures := result.get("failures"):
            return Status.FAILURE, f"exit code {code}: {failures[0]['cause'].splitlines()[0]}"
        n, errors = result["samples"], result["errors"]
        rate = figure(result["tokens_per_second"], 4)
        told = f"{result['status']}: {n} answers, {errors} errors, {rate} tokens/s"
        if code != ExitCode.DONE or errors or not n:
            return Status.FAILURE, f"{told}, exit code {code}"
        if counted := sum(one.get("server_generated_tokens", 0) for one in result["per_instance"]):
            told += f", by the servers' own count {counted:,.0f} tokens"
        if doubts := result.get("doubts"):
            return Status.WARNING, f"{told}; DOUBTFUL: {doubts[0]}"
        return Status.OK, told

    return judge


def _tokens(tried: Tried, config: RunConfig, ranks: int) -> list[Step]:
    """Return cases that compare greedy answers with the embedded engine's."""
    accuracy = ("--test_mode", "AccuracyOnly", "--save_outputs")
    mine = tried.step("answers", "each answer is kept, token by token", answered, *accuracy, n=ranks)
    name, shows = "the same answers", "greedy answers are those of the embedded engine"
    folder = Path(str(config.model_path or ""))
    if config.core_type == DEFAULT:
        return [mine]
    if not (folder / "config.json").is_file():
        return [
            mine,
            tried.not_here(name, shows, "no --model_path with a folder for the embedded engine"),
        ]
    words = ("--core_type", DEFAULT, "--model_path", str(folder), "--dtype", str(config.dtype or "auto"))
    reference = tried.folder / "reference"
    argv = (sys.executable, "-m", "mpillm", "mpirun", "-n", "2", "run", *_DATA, *words, *accuracy)
    same = _same_answers(Path(mine.argv[-1]), reference)
    return [mine, Step(name, shows, (*argv, "--log_dir", str(reference)), same)]


def _same_answers(run: Path, reference: Path) -> Judge:
    def judge(code: int, log: Path) -> tuple[Status, str]:
        if code != ExitCode.DONE:
            return Status.SKIPPED, f"the embedded engine could not: {why_ended(code, end_of(log))}"
        theirs, ours = _outputs(run), _outputs(reference)
        equal = sum(theirs.get(index) == tokens for index, tokens in ours.items())
        told = f"{equal} of {len(ours)} answers are equal, token by token"
        return Status.OK if equal == len(ours) == len(theirs) else Status.WARNING, told

    return judge


def _outputs(run: Path) -> dict[int, list[int]]:
    try:
        lines = (run / "outputs.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {one["index"]: one["output_tokens"] for one in map(json.loads, lines)}


def _layouts(tried: Tried, config: RunConfig, one: int, two: int) -> list[Step]:
    gpus, found = visible_gpus(), []
    have = None if gpus is None else len(gpus)
    each = (config.tensor_parallelism or 1) * (config.pipeline_parallelism or 1)
    if config.trtllm_server_urls or config.triton_server_urls:
        return []
    kind = kind_of(config.server) if config.server else None
    tp = _least_tp(Path(str(config.model_path or "")))
    for name, shows, more, ranks, needs in (
        ("two instances", "prompts are spread over two", (), two, 2 * each),
        (f"TP {tp}", f"a model over {tp} devices answers", ("--tensor_parallelism", str(tp)), 0, tp * each),
        ("disaggregated", "contexts are handed over", ("--mode", "disaggregated"), 0, 2),
    ):
        why = f"needs {needs} GPUs, there are {have}" if have is not None and needs > have else ""
        if name.startswith("TP"):
            if kind is not None and not kind.takes("tensor_parallelism"):
                why = f"--tensor_parallelism has no meaning for {kind.short_name}"
            elif config.is_user_set("tensor_parallelism"):
                continue
            ranks = one if kind is not None else disagg.ranks_for(tp * each, config.control_ranks)
        if name == "disaggregated" and kind is not None and not kind.disagg_protocol:
            why = f"of {kind.short_name}: {kind.no_disagg}"
        if why:
            found.append(tried.not_here(name, shows, why))
        else:
            judge = _handed_over if name == "disaggregated" and kind is not None else answered
            found.append(tried.step(name, shows, judge, *more, n=ranks))
    return found


def _least_tp(model: Path) -> int:
    """Return the fewest devices, but more than one, that the attention heads of a folder's model fit; 2 of
    another model."""
    try:
        told = read_object(model / "config.json")
    except (ConfigError, OSError):
        return 2
    told = told.get("text_config") or told
    heads = told.get("num_attention_heads")
    groups = told.get("num_key_value_heads") or heads
    if not (isinstance(heads, int) and isinstance(groups, int) and groups > 0):
        return 2
    fits = (n for n in range(2, heads + 1) if heads % n == 0 and (groups % n == 0 or n % groups == 0))
    return next(fits, 2)


def _handed_over(run: Path) -> Judge:
    def judge(code: int, log: Path) -> tuple[Status, str]:
        status, told = answered(run)(code, log)
        per = read_result(run).get("per_instance", ())
        n, counted = (sum(one.get(name, 0) for one in per) for name in ("handed_over", "server_transfers"))
        return status, f"{told}; {n} contexts handed over, transfers by the servers' count {counted:.0f}"

    return judge


def _cached(run: Path) -> Judge:
    def judge(code: int, log: Path) -> tuple[Status, str]:
        status, told = answered(run)(code, log)
        if status is Status.FAILURE:
            return status, told
        n = sum(one.get("server_cached_tokens", 0) for one in read_result(run).get("per_instance", ()))
        if not n:
            return (
                Status.WARNING,
                "it counts no prompt tokens from its cache: one on by mistake is not noticed",
            )
        return Status.OK, f"{n:,.0f} prompt tokens came from its cache, by its own count"

    return judge


def _losses(tried: Tried, config: RunConfig, ranks: int, *, owned: bool) -> list[Step]:
    """Return cases that kill and stop a server, or the last rank, while it answers."""
    if not owned and BackendRegistry.get(config.core_type).is_client:
        return []
    who, named = ("server", _of_server) if owned else ("rank", _of_rank(ranks - 1))
    found = []
    for number, does in ((signal.SIGKILL, "killed"), (signal.SIGSTOP, "stopped")):

        def judge(run: Path) -> Judge:
            return must_be_named(run, named, (int(ExitCode.INSTANCE_LOST),))

        name, shows = (
            f"a {who} {does}",
            f"a {who} that is {does} while it answers is named",
        )
        strike = _strike(number, tried.folder / name.replace(" ", "-"), owned, tried.deadline_s)
        more = (*_MANY, "--heartbeat_timeout", "20", "--stall_timeout", "30")
        found.append(tried.step(name, shows, judge, *more, n=ranks, disturb=strike))
    return found


def _of_server(told: Mapping[str, Any]) -> bool:
    return "server 0" in told["cause"]


def _of_rank(rank: int) -> Callable[[Mapping[str, Any]], bool]:
    return lambda told: bool(told["rank"] == rank)


def _strike(number: int, run: Path, owned: bool, deadline_s: float) -> Callable[[Child], str]:
    """Return what sends a signal to the server, or the last rank, once an answer is there."""

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
    """Return a process of a server that this one's ranks own: its parent is the guard that starts it."""
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            parent = process.parent()
            if parent is not None and is_guard(parent):
                return int(process.pid)
    return None


def _last_rank(run: Path) -> int | None:
    *_, last = json.loads((run / "ranks.json").read_text(encoding="utf-8"))
    return int(last["pid"]) if psutil.pid_exists(last["pid"]) else None
