"""A kind of server: its command line from the run's values, and the failures in its log."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from launch.command import Command, KnownFailure
from mpillm.devices import as_visible
from mpillm.programs.kind import ProgramKind
from mpillm.programs.servers.acceptance import OPTION
from mpillm.programs.servers.server_options import OptionSource, Release, installed_release

Option = Callable[[Any], Sequence[str]]
"""From an option's value to arguments. Raises ValueError: the server has nothing like it."""


class ServerNode(NamedTuple):
    """The node of a server that spans several."""

    number: int = 0  # from 0, which has the API
    n: int = 1
    first_host: str = ""  # as the other nodes reach it
    first_port: int | str = 0  # on the first host, where the nodes connect
    hosts: tuple[str, ...] = ()  # of all nodes


@dataclass(frozen=True)
class ServerSpec:
    """Server that a rank starts, or its part on one node."""

    kind: ServerKind
    model: str  # a folder, or a name that the server knows; "" if it needs none
    values: Mapping[str, Any]  # explicit values by option: from the command line, a file or the workload
    index: int = 0
    rank: int = 0  # its owner
    args: tuple[str, ...] = ()  # the user's
    devices: tuple[int, ...] | None = None  # GPUs, as the rank counts them; None: CPUs
    place: int = 0  # among the servers of its node
    program: str | None = None  # its path, from the user
    max_bytes: float = math.inf  # host memory
    host: str = "127.0.0.1"  # where it listens
    reached_at: str = "127.0.0.1"  # the host, as its clients name it
    restarts: int = 0  # allowed in the test
    stall_s: float = math.inf  # longest silence in the test
    release: Release | None = None  # the installed one; None: unknown
    role: str = ""  # context or generation, in disaggregated serving
    resets_prefix_cache: bool = False  # it needs a route that empties its prefix cache
    profiles: bool = False  # it needs routes that start and stop its profiler
    llm_args: Mapping[str, Any] = field(default_factory=dict)  # TensorRT-LLM's, of its section of the YAML
    node: ServerNode = field(default_factory=ServerNode)
    # Known at its start. A command line that is only printed has names instead.
    port: int | str = "PORT"
    more_ports: Mapping[str, int | str] = field(default_factory=dict)  # by name, see `ServerKind.more_ports`
    folder: Path = Path()  # for its files
    address: str = ""  # of the host, for servers on other nodes

    @property
    def title(self) -> str:
        """The name of the server in messages."""
        role = f", {self.role}" if self.role else ""
        return f"server {self.index} ({self.kind.short_name}{role}{self.of_nodes})"

    @property
    def of_nodes(self) -> str:
        """Its part of a server over several nodes, for messages."""
        return f", part {self.node.number + 1} of {self.node.n}" if self.node.n > 1 else ""

    @property
    def model_name(self) -> str:
        """The model as clients request it."""
        return Path(self.model).name

    @property
    def base(self) -> Path:
        """The path of its files, without a suffix."""
        return self.folder / base_name(self.index, self.node.number)

    @property
    def profile_folder(self) -> Path:
        """The folder for its profiler's traces."""
        return self.base.with_name(f"{self.base.name}_profile").absolute()

    @property
    def stacks_folder(self) -> Path:
        """The folder for the stacks of its threads, if it hangs."""
        return self.base.with_name(f"{self.base.name}_stacks").absolute()

    @property
    def launcher(self) -> NodesLauncher | None:
        """The launcher of all its nodes; None if it has one node, or if each owner starts its part."""
        return self.kind.launcher if self.node.n > 1 else None

    @property
    def visible_devices(self) -> Sequence[str] | None:
        """Its GPUs for CUDA_VISIBLE_DEVICES; None if it has none, or chooses by itself."""
        return None if self.devices is None or not self.kind.takes_gpus else as_visible(self.devices)

    @property
    def url(self) -> str:
        """The address for its clients; behind # the port of its metrics, if another."""
        if not self.kind.client_port:
            return f"http://{self.reached_at}:{self.port}"
        metrics = f"#{self.more_ports[self.kind.metrics_port]}" if self.kind.metrics_port else ""
        return f"{self.reached_at}:{self.more_ports[self.kind.client_port]}{metrics}"

    def command(self) -> Command:
        """Return the command line. Raises ValueError for values that the kind cannot take."""
        return self.kind.command(self)


_LOOK_AT = "look at --server_args, and at the version of the server"
COMMON_FAILURES = (
    KnownFailure(
        r"CUDA out of memory|OutOfMemoryError|\bCUDA_ERROR_OUT_OF_MEMORY|No available memory for the cache",
        "the GPU has too little memory",
        "lower --kv_cache_free_gpu_mem_fraction, --max_seq_len or --max_batch_size, or raise"
        " --tensor_parallelism",
    ),
    KnownFailure(
        r"[Aa]ddress already in use|EADDRINUSE|errno: 98",
        "another process has taken its port",
        "start the run again",
    ),
    KnownFailure(
        r"gated repo|GatedRepoError|401 Client Error|You are trying to access a gated",
        "the model is gated",
        "accept its licence and set HF_TOKEN, or name a folder with --model_path",
    ),
    KnownFailure(
        r"error: argument|invalid choice",
        "it does not accept the value of one of its options",
        _LOOK_AT,
    ),
    KnownFailure(
        r"Torch not compiled with CUDA",
        "it needs a GPU, but its PyTorch is built without CUDA",
        "install PyTorch for the GPU, or set the server's options for CPUs in --server_args",
    ),
    KnownFailure(
        r"no kernel image is available|not compiled with|requires compute capability",
        "it has no kernel for this GPU",
        "install a build of the server for it",
    ),
    KnownFailure(
        r"Can't load tokenizer|OSError: .{1,500} does not appear to have a file named",
        "the model is incomplete",
        "look at --model_path",
    ),
    KnownFailure(
        r"ModuleNotFoundError: No module named",
        "the Python that runs it lacks this package",
        "install it there, or activate the environment that has the server",
    ),
)


# What argparse and click print about an option.
_REJECTED = re.compile(r"(?:unrecognized arguments|No such option|ambiguous option):? ([^\n]{1,1000})")
_OPTION_NAME = re.compile(r"(?<![^\s'\"])--?[A-Za-z][\w-]*")


class NodesLauncher(NamedTuple):
    """A launcher that starts a server on all its nodes. Only the first node's owner starts a program."""

    # Its command line, from the server's own command line and from the program that it starts: the server's
    # argv, or a shell's script. Raises ValueError.
    command: Callable[[ServerSpec, Command, Sequence[str]], Command]
    script: Callable[[Command], str]  # the text of that script
    located: Callable[[Command], Command]  # as `ProgramKind.located`
    # From a log, which of its processes ended, and how; "" if unknown.
    explain: Callable[[ServerSpec, str], str]


@dataclass(frozen=True, kw_only=True)
class ServerKind(ProgramKind[ServerSpec]):
    """A kind of server; its `arguments` name the program, model, host and port."""

    options: Mapping[str, Option]  # by mpillm's option; a later one may overrule the arguments of an earlier
    always: Mapping[str, Any] = field(default_factory=dict)  # values where the user sets none
    # The text of a file with more options, from the values, which `in_file` names.
    file: Callable[[ServerSpec, Mapping[str, Any]], str] | None = None
    in_file: tuple[str, ...] = ()
    health: str = "/health"
    # It can listen on a port that another process has bound without listening: it sets SO_REUSEADDR.
    binds_reserved_port: bool = True
    core_type: str = "trtllm_endpoint"  # of its clients
    model_option: str = "model_path"  # which option names its model
    more_ports: tuple[str, ...] = ()  # besides that of HTTP
    client_port: str = ""  # the one of these for clients; "": that of HTTP
    metrics_port: str = ""  # the one of these with its metrics; "": that of HTTP
    names_model: bool = False  # its command line has the name by which clients request the model
    takes_gpus: bool = True  # CUDA_VISIBLE_DEVICES chooses its GPUs
    # Between its context and generation servers, see `openai_client.disagg_protocol`; "": mpillm starts none.
    disagg_protocol: str = ""
    no_disagg: str = "mpillm starts no context and generation servers of it"  # the reason
    disagg: Callable[[ServerSpec], Command] | None = None  # more arguments and environment for these
    disagg_ports: tuple[str, ...] = ()  # as `more_ports`, for these
    # Why its context server cannot pass KV caches to its generation server, by their layouts and the model's
    # KV heads (None: unknown, or the cache has none); "" if it can.
    no_transfer: Callable[[ServerSpec, ServerSpec, int | None], str] = lambda context, generation, heads: ""
    secret: str = ""  # the variable with the secret that these share, unless the user has set it
    multi_node: Callable[[ServerSpec], Command] | None = None  # as `disagg`, of a node; None: one node only
    launcher: NodesLauncher | None = None  # in place of `multi_node`
    takes_llm_args: bool = False  # TensorRT-LLM's, in its section of a YAML
    # The user's arguments and more environment for --acceptance_length; raises ValueError. None: the kind has
    # no such setting.
    fix_acceptance: Callable[[ServerSpec, float], Command] | None = None
    # As `disagg`, for a route that empties the prefix cache; None: it needs nothing.
    reset_route: Callable[[ServerSpec], Command] | None = None
    # As `disagg`, for a profiler that routes start and stop; None: it has no such routes.
    profiler: Callable[[ServerSpec], Command] | None = None
    acceptance_setting: str = ""  # part of the server's own name of that setting
    # As `disagg`, if the installed release has them.
    by_release: Callable[[ServerSpec], Command] | None = None
    option_source: OptionSource | None = None  # where the program's options are defined; None: not checked
    notes: Callable[[ServerSpec], Sequence[str]] | None = None  # lines for the plan

    common_failures = COMMON_FAILURES

    def ports(self, role: str) -> tuple[str, ...]:
        """Return the names of its ports besides that of HTTP; `role`: see `ServerSpec`."""
        return (*self.more_ports, *(self.disagg_ports if role else ()))

    def takes(self, name: str) -> bool:
        """Return whether an option of mpillm has a meaning for it."""
        is_acceptance = name == OPTION and self.fix_acceptance is not None
        return is_acceptance or name in self.options or name in self.in_file

    def release(self) -> Release | None:
        """Return the installed release; None if there is none here, or its options are not checked."""
        return installed_release(self.name, self.option_source) if self.option_source else None

    def explain(self, log: str) -> str:
        return super().explain(log) or self._unknown_options(log)

    def _unknown_options(self, log: str) -> str:
        """Return the options that the server rejected, with any new names; "" if it rejected none."""
        if (rejected := _REJECTED.search(log)) is None:
            return ""
        names = dict.fromkeys(_OPTION_NAME.findall(rejected[1].partition(" could match ")[0]))
        advice = {name: self.option_source.advice(name) if self.option_source else "" for name in names}
        listed = ", ".join(f"{name} ({text})" if text else name for name, text in advice.items())
        return f"it does not know {listed or 'one of its options'}: {_LOOK_AT}"

    def command(self, spec: ServerSpec) -> Command:
        args = [*self.arguments(spec)]
        values = {**self.always, **spec.values}
        if unknown := next((name for name in values if not self.takes(name)), None):
            raise ValueError(f"{unknown}: a {self.name} server has nothing like it")
        for name, option in self.options.items():
            if name not in values:
                continue
            try:
                args += option(values[name])
            except ValueError as error:
                raise ValueError(f"{name} {values[name]}: a {self.name} server {error}") from None
        own = self._own_args(spec)
        env = {**self.environment, **own.env}
        if spec.node.n > 1 and self.multi_node is None and self.launcher is None:
            raise ValueError(f"server_nodes {spec.node.n}: a {self.name} server is started on one node")
        more = (
            self.reset_route if spec.resets_prefix_cache else None,
            self.profiler if spec.profiles else None,
            self.disagg if spec.role else None,
            self.multi_node if spec.node.n > 1 else None,
            self.by_release,
        )
        for extend in filter(None, more):
            args += extend(spec).argv
            env |= extend(spec).env
        if (devices := spec.visible_devices) is not None:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        return Command((*args, *own.argv), env)

    def _own_args(self, spec: ServerSpec) -> Command:
        """Return the user's arguments, and more environment, with any --acceptance_length in them.

        Raises ValueError, also if the user has set the server's own setting: the result would not contain it.
        """
        if (own := self.acceptance_setting) and any(own in text for text in (*spec.args, *os.environ)):
            raise ValueError(f"{own}: use --{OPTION} instead, so that the result contains it")
        length = spec.values.get(OPTION)
        # A context server generates a single token of each response.
        if length is None or self.fix_acceptance is None or spec.role == "context":
            return Command(spec.args)
        try:
            return self.fix_acceptance(spec, length)
        except ValueError as error:
            raise ValueError(f"{OPTION} {length:g}: a {self.name} server {error}") from None

    def file_text(self, spec: ServerSpec) -> str:
        """Return the text of its file of options, ``base.yaml``; "" if it has none."""
        return self.file(spec, {**self.always, **spec.values}) if self.file else ""


def base_name(index: int, node: int = 0) -> str:
    """Return the beginning of the names of a server's files in the run directory."""
    return f"server_{index}" + (f"_{node}" if node else "")


def server_log(folder: Path, index: int) -> Path:
    """Return the log of a server, or of its first part, in the run directory `folder`."""
    return folder / f"{base_name(index)}.log"


PORT_IN_USE = COMMON_FAILURES[1]
"""Another process has bound the port first: the next attempt takes another one."""


def named(flag: str, **meanings: str) -> Option:
    """Return an option that is `flag` and the value; `meanings`: its allowed values."""

    def arguments(value: Any) -> Sequence[str]:
        if meanings and str(value) not in meanings:
            raise ValueError(f"has only {', '.join(meanings)}")
        return (flag, meanings.get(str(value), str(value)))

    return arguments


def switch(on: str = "", off: str = "") -> Option:
    """Return an option of two flags, either of which may be empty."""

    def arguments(value: Any) -> Sequence[str]:
        flag = on if value else off
        return (flag,) if flag else ()

    return arguments
