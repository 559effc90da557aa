"""Random faults of servers that ranks own: ``python -m tests.random_server_faults KIND [--first SEED]
[--rounds N] [--out FILE] [--keep DIR]``.

KIND is vllm, of the environment that `tools.install_peers` has made (MPILLM_PEERS), or tritonserver, of `make
triton`. Each round is a run with one server or two, which is hit in a phase: any process of a server, what
stands over it, or the rank that owns it is killed or stopped, while up to 4 processes take the cores. The run
must name it and nobody else, end in time, or go on as --on_instance_loss says, and leave no process and no
shared memory. vLLM serves a model of two layers with random weights, and forks its processes, so that a start
costs its imports once.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from launch.shared_files import mapped
from tests.helpers.campaign import parser_of, play_all, taken_cores
from tests.helpers.owned import guards, parent_of, started_at, title_of
from tests.helpers.peer_programs import forking_vllm, tiny_llama
from tests.helpers.real_triton import TRITONSERVER
from tests.helpers.support import (
    DONE,
    INSTANCE_LOST,
    NOT_READY,
    Command,
    Ended,
    Starter,
    descendants,
    make_samples,
    wait_until,
)

WITHIN_S = 240.0
NUMBERS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGABRT, signal.SIGSEGV)
PHASES = ("load", "load", "health", "warmup", "test", "test", "test", "drain")
BEFORE = {"load": "join", "health": "load", "warmup": "health", "test": "ready", "drain": "test"}
TEST_S = {"vllm": 30, "tritonserver": 12}  # a server that is started again takes long
SEEN_S = 1.0  # the longest until an owner has seen that a process is stopped
MOST_AGAIN = 2  # hits of a run whose server is started again


@dataclass(frozen=True)
class Round:
    """What a seed means."""

    seed: int
    kind: str
    phase: str
    number: int  # of a signal
    whom: str  # a process of the server, its guard, or its owner
    policy: str
    hits: int
    scenario: str
    tp: int
    servers: int
    load: int  # processes that take the cores
    after: float  # of the time that the phase may take, from 0 to 1

    @classmethod
    def of(cls, seed: int, kind: str) -> Round:
        chance = random.Random(seed)
        number, phase = chance.choice(NUMBERS), chance.choice(PHASES)
        whom = chance.choice(["process"] * 8 + ["guard", "owner"])
        tp = chance.choice([1, 1, 1, 2]) if kind == "vllm" else 1
        again = "restart" if kind == "vllm" else "continue"
        policy = chance.choice(["fail", again]) if phase == "test" and whom == "process" else "fail"
        hits = chance.randint(1, MOST_AGAIN) if policy == "restart" else 1
        servers = 1 if kind == "vllm" else 2
        # A test at a rate lasts: it can be hit, go on, and end.
        scenario = chance.choice(["Offline", "Server"]) if policy == "fail" else "Server"
        load = chance.choice([0, 0, 4])
        return cls(
            seed, kind, phase, int(number), whom, policy, hits, scenario, tp, servers, load, chance.random()
        )


def start(one: Round, starter: Starter) -> Command:
    """Start a run with servers of the round's kind."""
    data = make_samples(starter.folder / "samples.jsonl", [9 + i % 50 for i in range(32)])
    words: list[object] = ["--dataset_path", data.path, "--max_output_len", 24, "--scenarios", one.scenario]
    words += ["--on_instance_loss", one.policy, "--grace", 1.5, "--save_outputs"]
    words += ["--server_target_qps", 4] if one.scenario == "Server" else []
    brief = one.phase == "drain"
    words += ["--min_duration", 0 if brief else TEST_S[one.kind]]
    words += ["--min_query_count", 4 if brief else 64 if one.scenario == "Server" else 20_000]
    if one.kind == "vllm":
        words += ["--server", "vllm", "--model_path", tiny_llama(starter.folder / "tiny")]
        words += ["--load_format", "dummy", "--max_seq_len", 256, "--server_args=--enforce-eager"]
        words += ["--tensor_parallelism", one.tp] if one.tp > 1 else []
        return starter.start(
            2,
            *words,
            core="trtllm_endpoint",
            env=forking_vllm(starter.folder / "bin"),
        )
    starter.mpillm(
        *("generate-triton-config", "--model_path=tiny-llama", f"--scenarios={one.scenario}"),
        *("--triton_model_repo=repo", "--trtllm_runtime_flags=triton_backend:python,max_batch_size:8"),
        f"--triton_num_servers={one.servers}",
    ).must(DONE)
    words += ["--server", "tritonserver", "--triton_model_repo", "repo", "--tritonserver", TRITONSERVER]
    return starter.start(1 + one.servers, *words, core="triton_grpc")


def is_over(command: Command, phase: str) -> bool:
    return re.search(rf"^  {phase} +[\d.]+ s", command.out, re.MULTILINE) is not None


def wait_for(one: Round, command: Command, n_answers: int) -> bool:
    """Wait for the moment of a hit; return whether the run still goes on then."""

    def is_there() -> bool:
        if command.process.poll() is not None:
            return True
        if not is_over(command, BEFORE[one.phase]):
            return False
        outputs = command.log_dir / "outputs.jsonl"
        return one.phase != "test" or (outputs.exists() and outputs.read_bytes().count(b"\n") >= n_answers)

    wait_until(is_there, f"phase {one.phase}", WITHIN_S)
    if one.phase in ("load", "test"):
        time.sleep(one.after * {"vllm": 12, "tritonserver": 3}[one.kind] / (1 if one.phase == "load" else 3))
    return command.process.poll() is None


class Over(Exception):
    """The run is, and nobody is left to be hit."""


class Hit:
    """One process that was killed or stopped, and the tree that it belonged to."""

    def __init__(self, one: Round, command: Command, chance: random.Random) -> None:
        """Raises Over."""

        def over() -> list[int]:
            if command.process.poll() is not None:
                raise Over
            return []

        def lasting() -> list[int]:
            """Return the server's processes, but for short probes, without which it goes on."""
            titles = {pid: title_of(pid) for pid in descendants(self.guard)}
            return [pid for pid, title in titles.items() if title and " -c " not in title] or over()

        def hit() -> bool:
            """Choose and hit; return whether it was still there."""
            below = wait_until(lasting, "a server's process", WITHIN_S)
            self.pid = {"process": chance.choice(below), "guard": self.guard, "owner": owner}[one.whom]
            self.title = title_of(self.pid)
            below = descendants(self.guard)  # of which some may have ended, and wait to be asked for
            self.tree = {pid: at for pid in (self.guard, *below) if (at := started_at(pid))}
            self.shared = {path: inode for pid in self.tree for path, inode in mapped(pid).items()}
            self.loaded = is_over(command, "load")
            self.at = time.monotonic()
            try:
                os.kill(self.pid, self.number)
            except ProcessLookupError:
                return False
            return True

        self.number = signal.Signals(one.number)
        found = wait_until(lambda: guards(command) or over(), "what stands over a server", WITHIN_S)
        self.guard = chance.choice(sorted(found))
        owner = parent_of(self.guard)
        self.owner_at = started_at(owner)
        wait_until(hit, "a process to hit", WITHIN_S)
        self.ended_s: float | None = None  # until it had: some write where they were, first
        self.named_s = 0.0
        self.over_s: float | None = None  # until the test was: then nothing is started again

    def note_end(self, command: Command) -> None:
        if self.over_s is None and is_over(command, "test"):
            self.over_s = time.monotonic() - self.at
        if self.ended_s is None and started_at(self.pid) != self.tree.get(self.pid, self.owner_at):
            self.ended_s = round(time.monotonic() - self.at, 2)

    def note_named(self) -> None:
        self.named_s = round(time.monotonic() - self.at, 2)

    def is_named_in(self, one: Round, text: str) -> bool:
        """Return whether a message says what has become of it."""
        how = "is stopped: kill -CONT" if self.number == signal.SIGSTOP else f"({self.number.name})"
        if one.whom == "owner":
            return re.search(r"\brank [12]\b", text) is not None
        if one.whom == "guard":
            return f"its guard (pid {self.pid})" in text or f"process {self.pid} (" in text
        # A parent that was faster to ask how its child has ended keeps it from others.
        of_itself = self.number != signal.SIGSTOP and re.search(rf"process {self.pid} \(.*\) has ended", text)
        how_known = how in text or of_itself is not None
        whole = f"({one.kind}): was ended by" in text
        return how_known and (f"process {self.pid} (" in text or whole)


def play(one: Round, folder: Path) -> Mapping[str, Any]:
    """Return how it ended. AssertionError: not as it should."""
    chance = random.Random(-1 - one.seed)
    starter, hits = Starter("openmpi", folder), list[Hit]()
    with taken_cores(one.load):
        command = start(one, starter)
        try:
            for n in range(1, 1 + one.hits):
                if not wait_for(one, command, 4 * n):
                    break
                try:
                    hits.append(Hit(one, command, chance))
                except Over:
                    break
                wait_until(partial(is_reported, one, command, n, hits[-1]), "its being named", WITHIN_S)
                hits[-1].note_named()
                if n < one.hits:
                    wait_until(partial(is_back, command, n), "its return", WITHIN_S)
            ended = command.end(WITHIN_S, lingers=20)
        finally:
            command.kill()
    try:
        how = check(one, ended, hits)
    except AssertionError as error:
        raise AssertionError(f"{error}\nhit: {[(hit.pid, hit.title) for hit in hits]}\n{ended!r}") from None
    return {
        "how": how,
        "who": [hit.title for hit in hits],
        "ended_s": [hit.ended_s for hit in hits],
        "named_s": [hit.named_s for hit in hits],
        "said": (ended.messages or [""])[0][:300],
    }


def is_reported(one: Round, command: Command, n: int, hit: Hit) -> bool:
    """Return whether the `n`-th hit has been reported, or the run is over."""
    hit.note_end(command)
    if command.process.poll() is not None or "failed in phase" in command.err:
        return True
    if one.policy == "continue":
        return "\n  lost " in command.out
    return count_in_logs(command, "it is started again") >= n


def is_back(command: Command, n: int) -> bool:
    return command.process.poll() is not None or count_in_logs(command, "is ready after") > n


def is_left(path: Path, inode: int) -> bool:
    try:
        return path.stat().st_ino == inode
    except OSError:
        return False


def count_in_logs(command: Command, text: str) -> int:
    return sum(path.read_text(errors="replace").count(text) for path in command.log_dir.glob("ranks/*.log"))


def check(one: Round, ended: Ended, hits: Sequence[Hit]) -> str:
    """Return what kind of end it was."""
    assert "Traceback" not in ended.err, "a traceback"
    left = {pid for hit in hits for pid, at in hit.tree.items() if started_at(pid) == at}
    assert not left, f"left: {[(pid, title_of(pid)) for pid in left]}"
    shared = [path for hit in hits for path, inode in hit.shared.items() if is_left(path, inode)]
    assert not shared, f"left: {shared}"
    if ended.code == DONE:
        result = ended.result
        assert result["samples"] > 0 and result["errors"] == 0, "code 0 of a run with errors"
        hits = [hit for hit in hits if hit.over_s is None or hit.over_s > SEEN_S]
        if one.phase == "drain" or not hits:
            return "was over"
        if one.policy == "continue":
            (lost,) = result["lost"]
            assert hits[0].is_named_in(one, lost["cause"]), f"lost: {lost}"
            return "went on"
        assert one.policy == "restart", "it went on as if nothing had happened"
        again = [one for client in result["per_instance"] for one in client["server"].get("restarts", ())]
        assert len(again) == len(hits), f"{len(again)} restarts"
        for hit, restart in zip(hits, again, strict=True):
            assert hit.is_named_in(one, f"({one.kind}): {restart['why']}"), f"restart: {restart}"
            assert restart["back_after_s"] > 0
        return "was started again"
    assert hits, "nobody was hit"
    hit = hits[-1]
    assert ended.code in ([INSTANCE_LOST] if hit.loaded else [INSTANCE_LOST, NOT_READY]), "exit code"
    result = json.loads((ended.log_dir / "result.json").read_text())
    assert result["status"] == "FAILED" and result["exit_code"] == ended.code, "result.json"
    causes = "\n".join(f"rank {failure['rank']}: {failure['cause']}" for failure in result["failures"])
    assert hit.is_named_in(one, causes), f"the cause is: {causes}"
    assert hit.is_named_in(one, ended.message), "the message"
    assert (ended.log_dir / "report.html").exists(), "no page"
    return "named"


def main(argv: Sequence[str]) -> int:
    """Play the rounds; print a line for each."""
    parser = parser_of("tests.random_server_faults", __doc__ or "")
    parser.add_argument("kind", choices=("vllm", "tritonserver"))
    given = parser.parse_args(argv)
    return play_all(given, lambda seed: Round.of(seed, given.kind), play, given.kind)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
