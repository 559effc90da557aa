"""Random faults by seed: ``python -m tests.random_faults [--srun] [--first SEED] [--rounds N] [--out FILE]
[--keep DIR]``, as root.

Each round is a run on one host or on three, of namespaces, with Open MPI or MPICH, which is hit once, in a
phase: ranks are killed or stopped, a host loses its power or its cable, mpirun or a daemon of its is killed;
while up to 16 processes take the cores. It must end in time, leave no process, name who was hit and nobody
else, and leave a result and a page that say the same. A line per round goes to FILE, the run directories of
those that fell to DIR; the exit code is 1 if one fell.

With ``--srun`` the three hosts are the nodes of a Slurm (`tools.slurm`), whose srun starts the run: Open MPI
by PMIx, MPICH by PMI2. A run that PMI2 ends inside MPI_Init (docs/howto/cluster.md) has not begun: its line
says so, and the round is played once more.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.campaign import parser_of, play_all, taken_cores
from tests.helpers.clusters import THREE_HOSTS, OnHosts, UnderSlurm, kill_named, python_on, signal_rank_on
from tests.helpers.holds import GO, HELD, HOLD
from tests.helpers.instance_loss import TIMES, run_words
from tests.helpers.support import (
    DONE,
    INSTANCE_LOST,
    NOT_READY,
    PYTHONS,
    TEST_FAILED,
    Command,
    Ended,
    Samples,
    Starter,
    make_samples,
    wait_until,
)
from tools.hosts import HEAD, Hosts, hosts
from tools.slurm import slurm

WITHIN_S = 180.0
HEARTBEAT_S = 10
PHASES = ("join", "load", "warmup", "test", "test", "test", "drain", "stop")
HELD_PHASES = ("load", "warmup", "drain", "stop")  # one rank waits there
HITS = {  # what is hit, and who may be named for it
    "kill a rank": r"\brank {rank}\b|\bhost {host} \(",
    "stop a rank": r"\brank {rank}\b|\bhost {host} \(|\branks [\d, -]*\b{rank}\b",
    "kill a host's ranks": r"\bhost {host} \(|\branks? \d",
    "cut a host's power": r"\b{host}\b",
    "pull a host's cable": r"\b{host}\b",
    "kill a host's daemon": r"\b{host}\b",
    "kill mpirun": r"mpirun \(pid \d+\) was ended by signal 9 \(SIGKILL\)",
    "kill rank 0": r"rank 0\b.*(ended without an exit code|has ended)",
}
CAN_BE_SPARED = ("kill a rank", "kill a host's ranks", "stop a rank", "pull a host's cable")
ON_HOSTS_ONLY = {"kill a host's ranks", "cut a host's power", "pull a host's cable", "kill a host's daemon"}
UNDER_SRUN = {
    "kill a rank",
    "stop a rank",
    "kill a host's ranks",
    "cut a host's power",
    "pull a host's cable",
    "kill rank 0",
}
NOT_BEGUN = "value not properly terminated in client request"  # what Slurm's PMI2 prints then
SIZE = 6


@dataclass(frozen=True)
class Round:
    """What a seed means."""

    seed: int
    mpi: str
    spread: bool  # over three hosts
    policy: str
    phase: str
    hit: str
    rank: int  # that is hit
    load: int  # processes that take the cores
    after_s: float
    srun: bool = False

    @property
    def host(self) -> str:
        return f"h{self.rank // 2 + 1}"

    @property
    def may_continue(self) -> bool:
        """Whether the run need not end: it can spare the rank, or none is lost (MPICH's mpirun goes on
        without a daemon whose ranks are there)."""
        if self.hit == "kill a host's daemon":
            return self.mpi == "mpich"
        late = self.phase in PHASES[PHASES.index("test") :]
        return late and self.policy == "continue" and self.hit in CAN_BE_SPARED

    @classmethod
    def of(cls, seed: int, srun: bool = False) -> Round:
        chance = random.Random(seed)
        mpi, spread = chance.choice(["openmpi", "mpich"]), chance.random() < 0.7 or srun
        policy = chance.choice(["fail", "continue"]) if mpi == "openmpi" and not srun else "fail"
        hits = [name for name in HITS if spread or name not in ON_HOSTS_ONLY]
        hit = chance.choice([name for name in hits if name in UNDER_SRUN] if srun else hits)
        rank = (
            0 if hit == "kill rank 0" else chance.randrange(2, SIZE)
        )  # not the leader, whose host is rank 0's
        load, phase = chance.choice([0, 0, 4, 16]), chance.choice(PHASES)
        return cls(seed, mpi, spread, policy, phase, hit, rank, load, chance.random() * 0.3, srun)


def start(one: Round, on: OnHosts | UnderSlurm, few: Samples) -> Command:
    words = [*run_words(few, one.policy), "--join_deadline", 30]
    exports = {}
    holder = 5 if one.rank != 5 else 4
    if one.phase in HELD_PHASES:
        words += ["--core_type", HELD]
        exports = {HOLD: f"{one.phase}:{holder}"}
    else:
        words += ["--core_type", "dummy", "--core_options", TIMES]
    if isinstance(on, UnderSlurm):
        return on.start(
            ["-N", 3, "-n", SIZE, "--ntasks-per-node", 2, "--wait", 60],
            *words,
            "--log_dir",
            on.starter.folder / "run",
            env=exports,
        )
    where = THREE_HOSTS if one.spread else f"h1:{SIZE}"
    return on.start(where, *words, exports=exports)


@contextmanager
def place(one: Round, folder: Path) -> Iterator[tuple[Hosts, OnHosts | UnderSlurm]]:
    """Make three hosts; with what starts runs there."""
    starter = Starter(one.mpi, folder)
    if one.srun:
        with slurm(3) as cluster:
            yield cluster.hosts, UnderSlurm(cluster, starter)
    else:
        with hosts(3) as made:
            yield made, OnHosts(made, starter)


def wait_for_phase(one: Round, command: Command, made: Hosts) -> bool:
    """Return whether the run still goes on then."""
    before = {"load": "join", "warmup": "health", "drain": "test", "stop": "drain"}

    def is_there() -> bool:
        if one.phase == "join":
            return len(python_on(made, one.host if one.spread else "h1", "run")) >= (
                2 if one.spread else SIZE
            )
        if one.phase == "test":
            outputs = command.log_dir / "outputs.jsonl"
            return outputs.exists() and outputs.read_bytes().count(b"\n") >= 4
        return f"\n  {before[one.phase]} " in command.out

    wait_until(lambda: is_there() or command.process.poll() is not None, f"phase {one.phase}", WITHIN_S)
    time.sleep(one.after_s)
    return command.process.poll() is None


def hit(one: Round, made: Hosts) -> None:
    if one.hit in ("kill a rank", "kill rank 0"):
        signal_rank_on(made, one.rank)
    elif one.hit == "stop a rank":
        signal_rank_on(made, one.rank, signal.SIGSTOP)
    elif one.hit == "kill a host's ranks":
        for pid in python_on(made, one.host, "run"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    elif one.hit == "cut a host's power":
        made.cut_power(one.host)
    elif one.hit == "pull a host's cable":
        made.plug(one.host, in_=False)
    elif one.hit == "kill a host's daemon":
        kill_named(made, one.host, "prted", "hydra_pmi_proxy")
    else:
        kill_named(made, HEAD, "prterun", "mpirun")


def printed_messages(ended: Ended) -> str:
    """Return the messages of rank 0 and the launcher, without mpirun's own output."""
    lines, goes_on = [], False
    for line in ended.err.splitlines():
        goes_on = line.startswith("mpillm") or (goes_on and line.startswith("  "))
        lines += [line] if goes_on else []
    return "\n".join(lines)


def check(one: Round, ended: Ended, was_hit: bool) -> str:
    """Return what kind of end it was. AssertionError: it was none that should be."""
    assert "Traceback" not in ended.err, "a traceback"
    where = ended.log_dir / "result.json"
    result = json.loads(where.read_text()) if where.exists() else {}
    if ended.code == DONE:
        assert result["status"] == "VALID", "code 0 of a run that is not VALID"
        # Once all is done, and the summary is printed, a loss changes nothing.
        over = "\n  page  " in ended.out or "the run had ended by then" in ended.err
        assert one.may_continue or not was_hit or over, "it went on as if nothing had happened"
        if was_hit and one.hit == "kill a host's daemon" and one.phase in HELD_PHASES:
            assert f"mpirun has lost its daemon on {one.host}; its ranks go on" in ended.err, (
                "nothing is said of it"
            )
        if result["lost"]:
            assert one.policy == "continue" and {r for lost in result["lost"] for r in lost["ranks"]} <= _hit(
                one
            )
        return "went on" if was_hit and one.may_continue else "was over"
    assert was_hit, "nobody was hit"
    codes = (INSTANCE_LOST, TEST_FAILED, NOT_READY)
    # srun's is the highest of all tasks'
    assert ended.code in codes or (one.srun and ended.code > 128), f"exit code {ended.code}"
    message = printed_messages(ended)
    host = one.host if one.spread else "h1"
    pattern = HITS[one.hit].format(rank=one.rank, host=host)
    if one.phase == "join" and not result:
        assert message and ("rank 0 ended" not in message or one.rank == 0), f"join: {message}"
        return "named" if re.search(pattern, message, re.DOTALL) else "named in mpirun's words only"
    code = result["exit_code"]
    assert result["status"] == "FAILED" and code in (codes if one.srun else [ended.code]), (
        f"result.json says another end: {result['status']}, {code}"
    )
    causes = "\n".join(
        failure["cause"] if failure["rank"] is None else f"rank {failure['rank']}: {failure['cause']}"
        for failure in result["failures"]
    )
    ranks = {failure["rank"] for failure in result["failures"]} - {None}
    assert ranks <= _hit(one), f"ranks {ranks} are named: {causes}"
    if one.hit not in ON_HOSTS_ONLY or not ranks:
        assert re.search(pattern, causes, re.DOTALL), f"the cause is: {causes}"
    assert re.search(pattern, message, re.DOTALL), f"the message is: {message}"
    assert one.hit == "kill mpirun" or host in message, f"the message has no host: {message}"
    assert (ended.log_dir / "report.html").exists(), "no page"
    return "named"


def _hit(one: Round) -> set[int]:
    if one.hit in ON_HOSTS_ONLY:
        return {one.rank // 2 * 2, one.rank // 2 * 2 + 1}
    return set() if one.hit == "kill mpirun" else {one.rank}


def play(one: Round, folder: Path) -> dict[str, str | bool]:
    """Return how it ended. AssertionError: not as it should."""
    try:
        return {"how": _play(one, folder)}
    except AssertionError as error:
        if not one.srun or NOT_BEGUN not in str(error):
            raise
    again = folder / "again"
    again.mkdir()
    return {"how": _play(one, again), "not_begun_at_first": True}


def _play(one: Round, folder: Path) -> str:
    few = make_samples(folder / "few.jsonl", [1 + 37 * i % 293 for i in range(160)])
    with place(one, folder) as (made, on), taken_cores(one.load):
        command = start(one, on, few)
        try:
            if was_hit := wait_for_phase(one, command, made):
                hit(one, made)
            if one.phase in HELD_PHASES and one.may_continue:
                time.sleep(4)
                (folder / GO).touch()
            gone = one.hit in ("cut a host's power", "pull a host's cable", "kill a host's daemon")
            ended = command.end(WITHIN_S, lingers=60.0 if gone or one.phase == "join" else 10.0)
        finally:
            command.kill()
        try:
            return check(one, ended, was_hit)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{ended!r}") from None


def main(argv: Sequence[str]) -> int:
    """Play the rounds; print a line for each."""
    parser = parser_of("tests.random_faults", __doc__ or "")
    parser.add_argument("--srun", action="store_true", help="in a Slurm, started by its srun")
    given = parser.parse_args(argv)
    if not PYTHONS["mpich"]:
        parser.error("MPILLM_MPICH_PYTHON is not set: no environment with MPICH")
    name = "srun" if given.srun else "mpirun"
    return play_all(given, lambda seed: Round.of(seed, given.srun), play, name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
