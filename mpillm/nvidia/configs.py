"""Configurations of NVIDIA's backends (see `nvidia.backends`)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import disagg
from disagg.errors import ConfigError, about
from mpillm.nvidia.backends import TrtllmHarnessConfig
from mpillm.options.fields import AllFields
from mpillm.options.fields.runtime_flags import BUILD_OPTIONS
from mpillm.options.flags import LIMITS
from mpillm.options.mitten import autoconfigure, bind

if TYPE_CHECKING:  # its import takes time at the start of every rank
    from mpillm.data.model_files import EngineConfig

ENGINE_MODEL = "tensorrt_llm"
"""Name of the engine's model, which the other models and the public clients use."""


@autoconfigure
@bind(AllFields.engine_dir)
@dataclass
class TrtllmExecutorConfig(TrtllmHarnessConfig):
    """An engine of TensorRT-LLM; it must match the fields."""

    engine_dir: str | None = None
    engine_config: EngineConfig | None = None

    @about("engine_dir", "llm_gen_config_path", "trtllm_build_flags", "trtllm_runtime_flags", *BUILD_OPTIONS)
    def __post_init__(self) -> None:
        if self.engine_config is None:
            if self.engine_dir is None:
                raise ConfigError("--engine_dir is missing: the folder of the engine")
            from mpillm.data.model_files import EngineConfig

            self.engine_config = EngineConfig.from_engine_dir(self.engine_dir)
        super().__post_init__()
        build, mapping = self.engine_config.build_config, self.engine_config.pretrained_config.mapping
        where, flags = f"--engine_dir {self.engine_dir}", self.build_flags
        for name, expected, built in (
            ("tensor_parallelism", self.tensor_parallelism, mapping.tp_size),
            ("pipeline_parallelism", self.pipeline_parallelism, mapping.pp_size),
            ("moe_expert_parallelism", self.moe_expert_parallelism, mapping.moe_ep_size),
            *((f"trtllm_build_flags {name}", flags.get(name), getattr(build, name)) for name in LIMITS),
        ):
            if expected is not None and expected != built:
                raise ConfigError(f"{where} was built for {name} {built}, not {expected}")
        self._fit(vars(build), where)
        if self.gen_config is not None:
            gen = self.gen_config
            if gen.runtime_beam_width > build.max_beam_width:
                raise ConfigError(
                    f"{where} was built for {build.max_beam_width} beams: {self.gen_config_path} needs"
                    f" {gen.runtime_beam_width}"
                )
            max_output_len = build.max_seq_len - build.max_input_len
            # Optional in Hugging Face's file.
            required = gen.values(str(self.gen_config_path)).get(AllFields.max_output_len, 0)
            if required > max_output_len:
                raise ConfigError(
                    f"{where} was built for answers of {max_output_len} tokens (max_seq_len"
                    f" {build.max_seq_len} less max_input_len {build.max_input_len}):"
                    f" {self.gen_config_path} needs {required}"
                )


def model_name(benchmark: str, scenario: str, index: int) -> str:
    """Return a model's name, such as ``llama3_1-405b-offline-0``."""
    return f"{benchmark.replace('.', '_')}-{scenario.lower()}-{index}"


@autoconfigure
@bind(AllFields.triton_server_urls, "server_urls")
@bind(AllFields.triton_num_clients_per_server, "clients_per_server")
@bind(AllFields.triton_num_models_per_server, "models_per_server")
@bind(AllFields.triton_num_clients_per_frontend, "clients_per_frontend")
@bind(AllFields.triton_request_timeout, "request_timeout")
@bind(AllFields.triton_num_servers, "num_servers")
@bind(AllFields.triton_skip_server_spawn, "skip_server_spawn")
@bind(AllFields.triton_grpc_ports, "grpc_ports")
@bind(AllFields.triton_model_repo, "model_repo")
@bind(AllFields.triton_text_models, "text_models")
@bind(AllFields.engine_dir)
@bind(AllFields.load_deadline)
@bind(AllFields.health_deadline)
@dataclass
class TritonHarnessConfig(TrtllmHarnessConfig):
    """Number and addresses of Triton servers, and the clients of each."""

    # On all hosts, also from triton_grpc_ports; empty: mpillm starts servers on this host.
    server_urls: tuple[str, ...] = ()
    clients_per_server: int = 1
    models_per_server: int | None = None  # None, also below: the GPUs determine it
    clients_per_frontend: int = 1
    request_timeout: float | None = None  # seconds
    num_servers: int | None = None
    skip_server_spawn: bool = False
    grpc_ports: dict[str, tuple[int, ...]] | None = None
    model_repo: str = "build/triton_model_repo"
    text_models: bool = False
    engine_dir: str | None = None
    load_deadline: float = AllFields.load_deadline.default  # seconds, and below
    health_deadline: float = AllFields.health_deadline.default

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

    @property
    def server_url(self) -> str:
        """The first server; empty without servers."""
        return self.server_urls[0] if self.server_urls else ""

    @property
    def model_name(self) -> str:
        """The first model that `generate-triton-config` writes."""
        if self.text_models or not self.benchmarks:
            return ENGINE_MODEL
        return model_name(self.benchmarks[0], self.scenarios[0], 0)


@autoconfigure
@bind(AllFields.model_path)
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
        if self.backend_type == "trt":  # NVIDIA's other name
            self.runtime_flags["trtllm_backend"] = "cpp"
        if self.backend_type not in ("pytorch", "cpp"):
            raise ConfigError(
                f"trtllm_runtime_flags trtllm_backend {self.backend_type}: not one of pytorch, cpp, trt"
            )

    @property
    def model_name(self) -> str | None:
        """The model's folder or name."""
        return self.model_path

    @property
    def backend_type(self) -> str:
        """Name of the engine: pytorch or cpp."""
        return str(self.runtime_flags["trtllm_backend"])


@autoconfigure
@bind(AllFields.trtllm_server_urls, "endpoint_urls")
@bind(AllFields.endpoint_type)
@bind(AllFields.extra_body)
@bind(AllFields.extra_headers)
@bind(AllFields.endpoint_path)
@bind(AllFields.insecure)
@bind(AllFields.session_header)
@bind(AllFields.lora_modules)
@bind(AllFields.load_deadline)
@bind(AllFields.health_deadline)
@bind(AllFields.compliance_test)
@dataclass
class TrtllmEndpointConfig(TrtllmHlApiConfig):
    """trtllm-serve over HTTP."""

    endpoint_urls: tuple[str, ...] = ("0.0.0.0:30000",)
    endpoint_type: str = AllFields.endpoint_type.default
    extra_body: dict[str, Any] = field(default_factory=dict)
    extra_headers: dict[str, str] = field(default_factory=dict)
    endpoint_path: str | None = None
    insecure: bool = AllFields.insecure.default
    session_header: str = AllFields.session_header.default
    lora_modules: tuple[str, ...] | None = None
    load_deadline: float = AllFields.load_deadline.default  # seconds, and below
    health_deadline: float = AllFields.health_deadline.default
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
    def endpoint_url(self) -> str:
        """The first endpoint."""
        return self.endpoint_urls[0]

    @property
    def max_concurrency(self) -> int | None:
        """Maximum concurrent requests of one endpoint, by default its batch size. None: no limit.

        With attention data parallelism, each rank of a tensor parallel group has its own batch.
        """
        flags = self.runtime_flags
        if flags.get("max_concurrency") is not None:
            return int(flags["max_concurrency"])
        if flags.get("max_batch_size") is None:
            return None
        n_batches = self.tensor_parallelism if self.build_flags.get("enable_attention_dp") else 1
        return int(flags["max_batch_size"]) * n_batches


@autoconfigure
@bind(AllFields.disagg_config, "disagg_config_path")
@dataclass
class TrtllmDisaggEndpointConfig(TrtllmEndpointConfig):
    """Disaggregated trtllm-serve; the YAML file has the endpoint."""

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
