"""The configurations of backends: classes that the configurator fills from fields and TensorRT-LLM's files.

`RunConfig.build(cls)` makes one from a command's values; within `Configuration.autoapply()`, `cls()` does.
Each checks what must agree before anything is started, and raises ConfigError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import disagg
from disagg.errors import ConfigError, about
from mpillm import fields
from mpillm.config.flags import check_limits, limits_of_engine, overlaid
from mpillm.configurator import autoconfigure, bind
from mpillm.fields.runtime_flags import BUILD_OPTIONS, RUNTIME_FLAGS

if TYPE_CHECKING:  # its records take time to make, at the start of every rank
    from mpillm.models.model_files import EngineConfig, GenerationConfig


@autoconfigure
@bind(fields.core_type)
@bind(fields.benchmarks)
@bind(fields.scenarios)
@bind(fields.tensor_parallelism)
@bind(fields.pipeline_parallelism)
@bind(fields.moe_expert_parallelism)
@bind(fields.traffic_distribution_policy)
@bind(fields.show_steady_state_progress)
@bind(fields.llm_gen_config_path, "gen_config_path")
@bind(fields.log_dir)
@bind(fields.seed, "random_seed")
@bind(fields.stall_timeout)
@dataclass
class HarnessConfig:
    """What every backend needs."""

    core_type: str = fields.core_type.default
    benchmarks: tuple[str, ...] = ()
    scenarios: tuple[str, ...] = ("Offline",)
    tensor_parallelism: int = 1
    pipeline_parallelism: int = 1
    moe_expert_parallelism: int = 1
    traffic_distribution_policy: str = "load_balancing"
    show_steady_state_progress: bool = False
    gen_config_path: str | None = None
    log_dir: str | None = None
    random_seed: int = 0
    stall_timeout: float = fields.stall_timeout.default  # seconds
    # None: no file says it; the fields of group generation hold, and the model's own end tokens
    gen_config: GenerationConfig | None = None

    def __post_init__(self) -> None:
        if self.gen_config is None and self.gen_config_path:
            from mpillm.models.model_files import GenerationConfig

            self.gen_config = GenerationConfig.from_file(self.gen_config_path)

    @property
    def streaming(self) -> bool:
        """Whether first tokens are reported before answers are complete, as LoadGen wants except Offline."""
        return self.scenarios != ("Offline",) and (self.gen_config is None or self.gen_config.streaming)


@autoconfigure
@bind(fields.trtllm_checkpoint_flags, "checkpoint_flags")
@bind(fields.trtllm_build_flags, "build_flags")
@bind(fields.trtllm_runtime_flags, "runtime_flags")
@dataclass
class TrtllmHarnessConfig(HarnessConfig):
    """The flags in force, for our own cores, too: TRTLLM_RUNTIME_FLAGS over given ones over the defaults."""

    checkpoint_flags: dict[str, Any] = field(default_factory=dict)
    build_flags: dict[str, Any] = field(default_factory=dict)
    runtime_flags: dict[str, Any] = field(default_factory=dict)

    DEFAULT_RUNTIME_FLAGS: ClassVar[dict[str, Any]] = {
        n: f.default for n, f in RUNTIME_FLAGS.items() if f.default is not None
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self.runtime_flags = self.DEFAULT_RUNTIME_FLAGS | overlaid(
            fields.trtllm_runtime_flags, self.runtime_flags
        )
        for name in BUILD_OPTIONS:
            mine, flag = getattr(self, name), self.build_flags.get(name)
            if flag is not None and flag != mine:
                raise ConfigError(
                    f"trtllm_build_flags {name} is {flag}, but {name} is {mine}",
                    about=["trtllm_build_flags", name],
                )
        with about("trtllm_build_flags"):
            self._fit(self.build_flags, "trtllm_build_flags")

    def _fit(self, built: Mapping[str, Any], of: str) -> None:
        check_limits(self.runtime_flags, built, of)
        self.runtime_flags |= limits_of_engine(self.runtime_flags, built)


@autoconfigure
@bind(fields.engine_dir)
@dataclass
class TrtllmExecutorConfig(TrtllmHarnessConfig):
    """An engine of TensorRT-LLM, which must be what the fields say."""

    engine_dir: str | None = None
    engine_config: EngineConfig | None = None

    @about("engine_dir", "llm_gen_config_path", "trtllm_build_flags", "trtllm_runtime_flags", *BUILD_OPTIONS)
    def __post_init__(self) -> None:
        if self.engine_config is None:
            if self.engine_dir is None:
                raise ConfigError("--engine_dir is missing: the folder of the engine")
            from mpillm.models.model_files import EngineConfig

            self.engine_config = EngineConfig.from_engine_dir(self.engine_dir)
        super().__post_init__()
        build, mapping = self.engine_config.build_config, self.engine_config.pretrained_config.mapping
        where = f"--engine_dir {self.engine_dir}"
        for name, wanted, built in (
            ("tensor_parallelism", self.tensor_parallelism, mapping.tp_size),
            ("pipeline_parallelism", self.pipeline_parallelism, mapping.pp_size),
            ("moe_expert_parallelism", self.moe_expert_parallelism, mapping.moe_ep_size),
            (
                "trtllm_build_flags max_batch_size",
                self.build_flags.get("max_batch_size"),
                build.max_batch_size,
            ),
            (
                "trtllm_build_flags max_num_tokens",
                self.build_flags.get("max_num_tokens"),
                build.max_num_tokens,
            ),
        ):
            if wanted is not None and wanted != built:
                raise ConfigError(f"{where} was built for {name} {built}, not {wanted}")
        self._fit(vars(build), where)
        if self.gen_config is not None:
            gen = self.gen_config
            if gen.runtime_beam_width > build.max_beam_width:
                raise ConfigError(
                    f"{where} was built for {build.max_beam_width} beams: {self.gen_config_path} wants"
                    f" {gen.runtime_beam_width}"
                )
            room = build.max_seq_len - build.max_input_len
            # Hugging Face's need not say it
            wanted = gen.values(str(self.gen_config_path)).get(fields.max_output_len, 0)
            if wanted > room:
                raise ConfigError(
                    f"{where} was built for answers of {room} tokens (max_seq_len {build.max_seq_len} less"
                    f" max_input_len {build.max_input_len}): {self.gen_config_path} wants {wanted}"
                )


@autoconfigure
@bind(fields.triton_server_urls, "server_urls")
@bind(fields.triton_num_clients_per_server, "clients_per_server")
@bind(fields.triton_num_models_per_server, "models_per_server")
@bind(fields.triton_num_clients_per_frontend, "clients_per_frontend")
@bind(fields.triton_request_timeout, "request_timeout")
@bind(fields.triton_num_servers, "num_servers")
@bind(fields.triton_skip_server_spawn, "skip_server_spawn")
@bind(fields.triton_grpc_ports, "grpc_ports")
@bind(fields.triton_model_repo, "model_repo")
@bind(fields.engine_dir)
@bind(fields.load_deadline)
@bind(fields.health_deadline)
@dataclass
class TritonHarnessConfig(TrtllmHarnessConfig):
    """Triton servers: how many, where, and the clients of each."""

    # of all hosts, also when given by triton_grpc_ports; none: those that we start on this host
    server_urls: tuple[str, ...] = ()
    clients_per_server: int = 1
    models_per_server: int | None = None  # None, here and below: by the GPUs
    clients_per_frontend: int = 1
    request_timeout: float | None = None  # seconds
    num_servers: int | None = None
    skip_server_spawn: bool = False
    grpc_ports: dict[str, tuple[int, ...]] | None = None
    model_repo: str = "build/triton_model_repo"
    engine_dir: str | None = None
    load_deadline: float = fields.load_deadline.default  # seconds, and below
    health_deadline: float = fields.health_deadline.default

    @about("triton_server_urls", "triton_grpc_ports", "triton_skip_server_spawn")
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.grpc_ports:
            listed = tuple(f"{host}:{port}" for host, ports in self.grpc_ports.items() for port in ports)
            if self.server_urls and self.server_urls != listed:
                raise ConfigError(
                    f"--triton_server_urls {','.join(self.server_urls)} and --triton_grpc_ports"
                    f" ({','.join(listed)}) name different servers"
                )
            self.server_urls = listed
        if self.skip_server_spawn and not self.server_urls:
            raise ConfigError(
                "--triton_skip_server_spawn needs --triton_grpc_ports or --triton_server_urls: the addresses"
                " of the servers"
            )


@autoconfigure
@bind(fields.model_path)
@dataclass
class TrtllmHlApiConfig(TrtllmHarnessConfig):
    """TensorRT-LLM's LLM class."""

    model_path: str | None = None

    DEFAULT_RUNTIME_FLAGS: ClassVar[dict[str, Any]] = {
        **TrtllmHarnessConfig.DEFAULT_RUNTIME_FLAGS,
        "trtllm_backend": "pytorch",
    }

    @about("trtllm_runtime_flags")
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend_type not in ("pytorch", "cpp"):
            raise ConfigError(
                f"trtllm_runtime_flags trtllm_backend {self.backend_type}: not one of pytorch, cpp"
            )

    @property
    def backend_type(self) -> str:
        """pytorch or cpp: which engine does the work."""
        return str(self.runtime_flags["trtllm_backend"])


@autoconfigure
@bind(fields.trtllm_server_urls, "endpoint_urls")
@bind(fields.load_deadline)
@bind(fields.health_deadline)
@bind(fields.compliance_test)
@dataclass
class TrtllmEndpointConfig(TrtllmHlApiConfig):
    """trtllm-serve over HTTP."""

    endpoint_urls: tuple[str, ...] = ("0.0.0.0:30000",)
    load_deadline: float = fields.load_deadline.default  # seconds, and below
    health_deadline: float = fields.health_deadline.default
    compliance_test: str | None = None

    DEFAULT_RUNTIME_FLAGS: ClassVar[dict[str, Any]] = {
        **TrtllmHlApiConfig.DEFAULT_RUNTIME_FLAGS,
        "num_postprocess_workers": 2,
        "workers_per_core": 2,
        "http_backend": "custom_http",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_postprocess_workers", "workers_per_core", "max_concurrency"):
            value = self.runtime_flags.get(name)
            if value is not None and not (type(value) is int and value >= 1):
                raise ConfigError(
                    f"trtllm_runtime_flags {name} {value}: expected a whole number of at least 1"
                )
        if self.runtime_flags["http_backend"] not in ("custom_http", "openai_async"):
            raise ConfigError(
                f"trtllm_runtime_flags http_backend {self.runtime_flags['http_backend']}: not one of"
                " custom_http, openai_async"
            )

    @property
    def max_concurrency(self) -> int | None:
        """Maximum requests of one endpoint at once: its batch size, unless a flag states it. None: no limit.

        With attention data parallelism each rank of a tensor parallel group has a batch of its own.
        """
        flags = self.runtime_flags
        if flags.get("max_concurrency") is not None:
            return int(flags["max_concurrency"])
        if flags.get("max_batch_size") is None:
            return None
        return int(flags["max_batch_size"]) * (
            self.tensor_parallelism if self.build_flags.get("enable_attention_dp") else 1
        )


@autoconfigure
@bind(fields.disagg_config, "disagg_config_path")
@dataclass
class TrtllmDisaggEndpointConfig(TrtllmEndpointConfig):
    """trtllm-serve disaggregated: the endpoint is the one of its YAML."""

    disagg_config_path: str | None = None

    @about("trtllm_server_urls", "disagg_config")
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.disagg_config_path is not None:
            loaded = disagg.load(self.disagg_config_path)
            url = f"{loaded.hostname}:{loaded.port}"
            if self.endpoint_urls not in (TrtllmEndpointConfig.endpoint_urls, (url,)):
                raise ConfigError(
                    f"--trtllm_server_urls {','.join(self.endpoint_urls)}, but {self.disagg_config_path}"
                    f" has {url}"
                )
            self.endpoint_urls = (url,)
        if len(self.endpoint_urls) != 1 or not re.fullmatch(r".+:\d+", self.endpoint_urls[0]):
            raise ConfigError(
                f"--trtllm_server_urls {','.join(self.endpoint_urls)}: a disaggregated server has one"
                " endpoint, host:port"
            )
