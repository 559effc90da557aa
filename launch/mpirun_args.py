"""Arguments of ``mpillm mpirun``: its own options, options of `mpirun`, and the command with its options."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from disagg.errors import ConfigError, nearest
from launch.launcher import RANK_COMMANDS
from launch.safe_text import whole_number
from launch.supervisor import START_DEADLINE_S

USAGE = """\
usage: python -m mpillm mpirun -n N [--dry_run] [--start_deadline S]
           [mpirun options] [--] COMMAND [options of COMMAND]

Prints and starts the mpirun line for the MPI that mpi4py is bound to (Open MPI
or MPICH).

  -n N        number of ranks (also -np, --np, -c)
  --dry_run   print the line, start nothing
  --start_deadline S
              seconds that mpirun has to start rank 0 [default: {start:g}]
  COMMAND     {commands}

Other options before COMMAND go to mpirun as they are: --hostfile FILE,
--host LIST, -x NAME, --map-by POLICY, --bind-to POLICY, --mca NAME VALUE, …

Exit codes: 0 done, 1 a stage failed, 2 bad usage or configuration, 3 did not
become ready, 4 the test failed, 5 a rank or an instance was lost, 128 + signal
when interrupted (130 after Ctrl-C); any other code is mpirun's own."""

_RANKS = frozenset({"n", "np", "c"})
HOSTS = frozenset(
    {"host", "H", "hostfile", "machinefile", "default-hostfile", "f", "hosts", "rankfile", "rf"}
)
PLACEMENT = HOSTS | {
    "oversubscribe",
    "nooversubscribe",
    "map-by",
    "N",
    "npernode",
    "bynode",
    "byslot",
    "bycore",
    "ppn",
}


@dataclass(frozen=True)
class Arguments:
    """The arguments of ``mpillm mpirun``."""

    ranks: int
    dry_run: bool
    options: list[str]
    command: list[str]
    start_deadline_s: float = START_DEADLINE_S


def parse_arguments(argv: Sequence[str], commands: Sequence[str] = RANK_COMMANDS) -> Arguments:
    """Split `argv` into options of `mpillm mpirun`, options of `mpirun`, and the command with its options.

    An option of `mpirun` takes the arguments up to the next option or command, so no list of its options is
    necessary. If a value is also the name of a command, write it with an equals sign (``--host=bench``).
    """
    ranks: int | None = None
    dry_run = False
    start_deadline_s = START_DEADLINE_S
    options: list[str] = []
    values: list[str] = []
    takes_values = False
    args = list(argv)
    while args and args[0].replace("_", "-") not in commands:
        arg = args.pop(0)
        if arg == "--":
            break
        if arg.startswith("-"):
            name = arg.lstrip("-")
            takes_values = False
            if match := re.fullmatch(rf"(-+(?:{'|'.join(_RANKS)}))(?:=|(?=[0-9]))(.*)", arg):  # -n=5, -n5
                ranks = _number_of_ranks(match[1], [match[2]])
            elif name in _RANKS:
                ranks = _number_of_ranks(arg, args)
            elif name.replace("-", "_") == "dry_run":
                dry_run = True
            elif name.partition("=")[0].replace("-", "_") == "start_deadline":
                start_deadline_s = _seconds(arg, args)
            else:
                options.append(arg)
                takes_values = "=" not in arg
        elif takes_values:
            options.append(arg)
            values.append(arg)
        else:
            args.insert(0, arg)
            break
    if not args:
        suggestion = next(filter(None, (nearest(value, commands) for value in values)), "")
        raise ConfigError(
            f"mpirun: no command to run{suggestion}; after the options of mpirun comes one of:"
            f" {', '.join(commands)}"
        )
    args[0] = args[0].replace("_", "-")
    if args[0] not in commands:
        raise ConfigError(
            f"mpirun: '{args[0]}' is not a command that runs on ranks{nearest(args[0], commands)};"
            f" those are: {', '.join(commands)}"
        )
    if ranks is None:
        raise ConfigError(f"mpirun: -n is needed: the number of ranks, as in 'mpirun -n 5 {args[0]} …'")
    return Arguments(ranks, dry_run, options, args, start_deadline_s)


def _number_of_ranks(option: str, args: list[str]) -> int:
    value = args.pop(0) if args else ""
    if not re.fullmatch(r"[0-9]{1,7}", value) or int(value) < 1:
        raise ConfigError(f"mpirun: {option} '{value}': must be a number of ranks, at least 1")
    return int(value)


def _seconds(option: str, args: list[str]) -> float:
    name, equals, value = option.partition("=")
    value = value if equals else args.pop(0) if args else ""
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]*)?", value) or float(value) == 0:
        raise ConfigError(f"mpirun: {name} '{value}': must be a number of seconds above 0")
    return float(value)


def has_option(options: Sequence[str], names: frozenset[str] | set[str]) -> bool:
    """Return whether one of `names` (without dashes) is among the options passed to `mpirun`."""
    return any(option.startswith("-") and option.lstrip("-").partition("=")[0] in names for option in options)


def spans_hosts(options: Sequence[str], env: Mapping[str, str]) -> bool:
    """Return whether ranks may run on other hosts: a host list is given, or several nodes are allocated."""
    if has_option(options, HOSTS) or env.get("PBS_NODEFILE") or env.get("LSBHOSTS"):
        return True
    nodes = env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES") or "1"
    return (whole_number(nodes) or 0) > 1
