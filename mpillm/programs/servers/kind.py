"""What a run must know of a kind of server: its command line from the run's values, and its last words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from launch.command import Command, KnownFailure, explained

Option = Callable[[Any], Sequence[str]]
"""From an option's value to words of a command line. Raises ValueError: the server has nothing like it."""


class Part(NamedTuple):
    """Which part of a server that goes over several nodes."""

    node: int = 0  # from 0, whose part has the server's API
    n: int = 1
    host: str = ""  # of the first, as the others reach it
    port: int | str = 0  # there, where the parts meet


class Wanted(NamedTuple):
    """What one server is to be."""

    model: str
    name: str  # of the model, as clients ask for it
    host: str
    port: int | str
    values: Mapping[str, Any]  # by the name of the option: those that the user, a file or the workload states
    args: Sequence[str] = ()  # as the user types them
    devices: Sequence[str] | None = None  # its GPUs, as CUDA_VISIBLE_DEVICES names them; None: it has none
    base: str = ""  # of the names of its files: options in a file, a folder
    place: int = 0  # among the servers of its node
    more_ports: Mapping[str, int | str] = MappingProxyType({})  # see `ServerKind.more_ports`
    program: str | None = None  # where the user says that it is
    role: str = ""  # context or generation: the half of disaggregated serving that it is; "": it does both
    address: str = ""  # where servers on other nodes reach it
    llm_args: Mapping[str, Any] = MappingProxyType({})  # TensorRT-LLM's, of its section of the YAML
    part: Part = Part()


@dataclass(frozen=True)
class ServerKind:
    """A kind of server."""

    name: str
    words: Callable[[Wanted], Sequence[str]]  # the program, its model, name, host and port
    options: Mapping[str, Option]  # by the name of ours; a later one may overrule the words of an earlier
    always: Mapping[str, Any] = field(default_factory=dict)  # values that it gets also where none is stated
    environment: Mapping[str, str] = field(default_factory=dict)
    # The text of a file with more options, from the values; those named in `in_file` it is made of.
    file: Callable[[Wanted, Mapping[str, Any]], str] | None = None
    in_file: tuple[str, ...] = ()
    health: str = "/health"
    failures: tuple[KnownFailure, ...] = ()
    # It can listen on a port that is bound, but not listened on, by another process: it sets SO_REUSEADDR.
    binds_held_port: bool = True
    install: str = ""  # what to do where its program is missing
    core_type: str = "trtllm_endpoint"  # of its clients
    model_option: str = "model_path"  # which option says what it serves
    more_ports: tuple[str, ...] = ()  # that it needs besides the one of HTTP
    client_port: str = ""  # the one of these that clients connect to; "": that of HTTP
    metrics_port: str = ""  # the one of these that has its metrics; "": that of HTTP
    names_model: bool = False  # its command line gives the model the name by which clients request it
    takes_gpus: bool = True  # it is told which GPUs it has
    handover: str = (
        ""  # how its halves hand KV caches over: see `openai_client.handover`; "": they can't here
    )
    no_handover: str = "mpillm starts no context and generation servers of it"  # why they can't
    half: Callable[[Wanted], Command] | None = None  # more words, and environment, of a half
    half_ports: tuple[str, ...] = ()  # as `more_ports`, of a half
    secret: str = ""  # the variable with the secret that a run's halves share, unless the user has set it
    of_nodes: Callable[[Wanted], Command] | None = None  # as `half`, of a part; None: it has none
    takes_llm_args: bool = False  # those of TensorRT-LLM in its section of a YAML

    def url(self, host: str, wanted: Wanted) -> str:
        """Return where its clients reach it on `host`; behind # the port of its metrics, if another."""
        if self.client_port:
            metrics = f"#{wanted.more_ports[self.metrics_port]}" if self.metrics_port else ""
            return f"{host}:{wanted.more_ports[self.client_port]}{metrics}"
        return f"http://{host}:{wanted.port}"

    def ports(self, role: str) -> tuple[str, ...]:
        """Return the names of the ports that it needs besides that of HTTP; `role`: see `Wanted`."""
        return (*self.more_ports, *(self.half_ports if role else ()))

    def takes(self, name: str) -> bool:
        """Return whether an option of ours has a meaning for it."""
        return name in self.options or name in self.in_file

    def command(self, wanted: Wanted) -> Command:
        """Return the command line. Raises ValueError for values that this kind can't take, naming them."""
        words = [*self.words(wanted)]
        values = {**self.always, **wanted.values}
        if unknown := next((name for name in values if not self.takes(name)), None):
            raise ValueError(f"{unknown}: a {self.name} server has nothing like it")
        for name, option in self.options.items():
            if name not in values:
                continue
            try:
                words += option(values[name])
            except ValueError as error:
                raise ValueError(f"{name} {values[name]}: a {self.name} server {error}") from None
        env = dict(self.environment)
        if wanted.part.n > 1 and self.of_nodes is None:
            raise ValueError(f"server_nodes {wanted.part.n}: a {self.name} server is started on one node")
        more = (self.half if wanted.role else None, self.of_nodes if wanted.part.n > 1 else None)
        for made in filter(None, more):
            words += made(wanted).argv
            env |= made(wanted).env
        if wanted.devices is not None:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(wanted.devices)
        return Command((*words, *wanted.args), env)

    def file_text(self, wanted: Wanted) -> str:
        """Return the text of its file of options, ``base.yaml``; "" if it has none."""
        return self.file(wanted, {**self.always, **wanted.values}) if self.file else ""

    def explain(self, log: str) -> str:
        """Return what a line of its log means, and what to do; "" if none is known."""
        return explained(log, (*self.failures, *OF_ALL))


OF_ALL = (
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
        r"unrecognized arguments|No such option|error: argument|invalid choice",
        "it does not know one of its options",
        "look at --server_args, and at the version of the server",
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


def base_name(index: int, node: int = 0) -> str:
    """Return the beginning of the names of a server's files in the run directory; `node`: of its part."""
    return f"server_{index}" + (f"_{node}" if node else "")


def server_log(folder: Path, index: int) -> Path:
    """Return the log of a server, or of its first part, in the run directory `folder`."""
    return folder / f"{base_name(index)}.log"


PORT_TAKEN = OF_ALL[1]
"""Where another process was faster: the next try takes another port."""


def named(flag: str, **meanings: str) -> Option:
    """Return an option that is `flag` and the value; `meanings`: its words, if it has only some values."""

    def words(value: Any) -> Sequence[str]:
        if meanings and str(value) not in meanings:
            raise ValueError(f"has only {', '.join(meanings)}")
        return (flag, meanings.get(str(value), str(value)))

    return words


def switch(on: str = "", off: str = "") -> Option:
    """Return an option of two flags, of which either may be nothing to say."""

    def words(value: Any) -> Sequence[str]:
        flag = on if value else off
        return (flag,) if flag else ()

    return words
