"""Model repositories for Triton with TensorRT-LLM's backend, one for each `tritonserver`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError, nearest
from launch.children import Children
from mpillm.builder.operation import Command, Operation, identity
from mpillm.builder.pbtxt import Name, dump
from mpillm.builder.preconditions import check_gpus
from mpillm.builder.trtllm import read_engine
from mpillm.devices import visible_gpus
from mpillm.model_files import BuildConfig

MODEL_VERSION = "1"

_SOURCE = "--trtllm_runtime_flags"

# Runtime flags of the harness, and the parameters of the `tensorrt_llm` model that they become.
_POLICIES = {"max_util": "max_utilization", "no_evict": "guaranteed_no_evict"}
_RENAMED = {
    "kvcache_free_gpu_mem_frac": "kv_cache_free_gpu_mem_fraction",
    "exclude_input_from_output": "exclude_input_in_output",
    "engine_dir": "gpt_model_path",
    "batching_strategy": "gpt_model_type",
    "encoder_engine_dir": "encoder_model_path",
}
# Parameters that go in under their own names: those of tensorrtllm_backend's docs/model_config.md.
_PARAMETERS = frozenset(
    """
    batch_scheduler_policy cancellation_check_period_ms cross_kv_cache_fraction cuda_graph_cache_size cuda_graph_mode decoding_mode
    eagle_choices enable_chunked_context enable_context_fmha_fp32_acc enable_kv_cache_reuse encoder_engine_dir exclude_input_in_output
    gpu_weights_percent guided_decoding_backend iter_stats_max_iterations kv_cache_free_gpu_mem_fraction kv_cache_host_memory_bytes
    lora_cache_gpu_memory_fraction lora_cache_host_memory_bytes lora_cache_max_adapter_size lora_cache_optimal_adapter_size
    lora_prefetch_dir max_attention_window_size max_beam_width max_tokens_in_paged_kv_cache medusa_choices multi_block_mode
    normalize_log_probs num_nodes participant_ids recv_poll_period_ms request_stats_max_iterations sink_token_length
    stats_check_period_ms tokenizer_dir xgrammar_tokenizer_info_path
    """.split()  # noqa: SIM905 (as many names as an editor shows on four lines)
)
# Flags of the harness, or of this file, that are no parameters of the backend.
_ELSEWHERE = frozenset(
    """
    context_chunking_policy use_inflight_batching enable_batch_size_tuning enable_max_num_tokens_tuning dynamic_batch_moving_average_window
    max_batch_size max_num_tokens max_queue_delay_microseconds max_queue_size
    """.split()  # noqa: SIM905
)


def _tensor(name: str, kind: str, *dims: int, scalar: bool = False, optional: bool = True, ragged: bool = False) -> dict[str, Any]:
    tensor: dict[str, Any] = {"name": name, "data_type": Name(f"TYPE_{kind}"), "dims": list(dims)}
    if scalar:
        tensor["reshape"] = {"shape": []}
    if optional:
        tensor["optional"] = True
    if ragged:
        tensor["allow_ragged_batch"] = True
    return tensor


# What our requests set and our answers carry, of the tensors in the backend's own template.
_INPUTS = (
    _tensor("input_ids", "INT32", -1, optional=False, ragged=True),
    _tensor("input_lengths", "INT32", 1, scalar=True, optional=False),
    _tensor("request_output_len", "INT32", 1, scalar=True, optional=False),
    _tensor("end_id", "INT32", 1, scalar=True),
    _tensor("pad_id", "INT32", 1, scalar=True),
    _tensor("stop_words_list", "INT32", 2, -1, ragged=True),
    _tensor("beam_width", "INT32", 1, scalar=True),
    _tensor("temperature", "FP32", 1, scalar=True),
    _tensor("runtime_top_k", "INT32", 1, scalar=True),
    _tensor("runtime_top_p", "FP32", 1, scalar=True),
    _tensor("min_tokens", "INT32", 1, scalar=True),
    _tensor("seed", "UINT64", 1, scalar=True),
    _tensor("exclude_input_in_output", "BOOL", 1, scalar=True),
    _tensor("stop", "BOOL", 1, scalar=True),
    _tensor("streaming", "BOOL", 1, scalar=True),
)
_OUTPUTS = (_tensor("output_ids", "INT32", -1, -1, optional=False), _tensor("sequence_length", "INT32", -1, optional=False))


@dataclass(frozen=True)
class TritonLayout:
    """How many servers there are, how many models each loads, and how many GPUs a model takes."""

    n_servers: int
    models_per_server: int
    gpus_per_model: int

    def gpus(self, model: int) -> range:
        """The GPUs of a model, counted over all servers."""
        return range(model * self.gpus_per_model, (model + 1) * self.gpus_per_model)


def triton_layout(scenario: str, gpus_per_model: int, n_servers: int | None, models_per_server: int | None) -> TritonLayout:
    """The numbers given, or those that follow from the GPUs of this node: Offline one server for all models, else one server for each.

    A gRPC channel carries about a hundred streams at once, and only Offline has none. Where the GPUs are not known a server has one model.
    ConfigError when the models can't be spread evenly.
    """
    gpus = visible_gpus()
    models = max(1, len(gpus) // gpus_per_model) if gpus else None
    if n_servers is None and models_per_server is None:
        n_servers = 1 if scenario == "Offline" or models is None else models
    if models_per_server is None:
        assert n_servers is not None
        models_per_server = 1 if models is None else models // n_servers
        if models is not None and models % n_servers:
            raise ConfigError(
                f"--triton_num_servers {n_servers}: the {models} models that fit {len(gpus or ())} GPUs can't be spread evenly over them"
            )
    elif n_servers is None:
        n_servers = 1 if models is None else max(1, models // models_per_server)
    return TritonLayout(n_servers, models_per_server, gpus_per_model)


def model_name(benchmark: str, scenario: str, index: int) -> str:
    """``llama3_1-405b-offline-0``"""
    return f"{benchmark.replace('.', '_')}-{scenario.lower()}-{index}"


def model_parameters(flags: Mapping[str, Any]) -> dict[str, str]:
    """Parameters of the `tensorrt_llm` model, as text, from runtime flags. ConfigError for a flag or a value that it does not know."""
    parameters: dict[str, str] = {}
    for name, value in flags.items():
        if name in _ELSEWHERE or value is None:
            continue
        if name not in _PARAMETERS and name not in _RENAMED:
            known = (*_PARAMETERS, *_RENAMED, *_ELSEWHERE)
            raise ConfigError(f"{_SOURCE}: Triton's tensorrt_llm model has no parameter '{name}'{nearest(name, known)}")
        if name == "batch_scheduler_policy":
            if value not in _POLICIES and value not in _POLICIES.values():
                raise ConfigError(f"{_SOURCE}: batch_scheduler_policy {value}: Triton's backend has {' and '.join(_POLICIES)}")
            value = _POLICIES.get(value, value)
        parameters[_RENAMED.get(name, name)] = str(value).lower() if isinstance(value, bool) else str(value)
    return parameters


class GenerateTritonConfigOp(Operation):
    """The model repository of one server: `<repo>_<server>/<benchmark>-<scenario>-<k>/config.pbtxt`."""

    name = "triton-config"
    hand_edited = True

    def __init__(
        self,
        *,
        engine_dir: str,
        engine: BuildConfig,
        repo: str,
        server: int,
        layout: TritonLayout,
        benchmark: str,
        scenario: str,
        streaming: bool,
        runtime_flags: Mapping[str, Any],
    ) -> None:
        """`engine`: its build configuration. `runtime_flags`: with the limits of the build flags, as `TrtllmHarnessConfig` has them."""
        self.engine_dir = Path(engine_dir).absolute()  # tritonserver may be started elsewhere
        self.engine = engine
        self.output = Path(f"{repo}_{server}")
        self.layout = layout
        self.models = [server * layout.models_per_server + k for k in range(layout.models_per_server)]
        self.names = [model_name(benchmark, scenario, model) for model in self.models]
        self.streaming = streaming
        self.runtime_flags = runtime_flags

    def config(self, index: int) -> dict[str, Any]:
        """`config.pbtxt` of the repository's model `index`."""
        build, flags = self.engine, self.runtime_flags
        batch = flags.get("max_batch_size") or build.max_batch_size
        if batch > build.max_batch_size:
            raise ConfigError(f"max_batch_size {batch}: the engine in {self.engine_dir} was built for {build.max_batch_size}")
        parameters = {
            "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
            "gpt_model_type": "inflight_fused_batching" if flags.get("use_inflight_batching", True) else "V1",
            "gpt_model_path": str(self.engine_dir),
            "max_beam_width": str(build.max_beam_width),
            **model_parameters(flags),
            "gpu_device_ids": ",".join(map(str, self.layout.gpus(self.models[index]))),
        }
        return {
            "name": self.names[index],
            "backend": "tensorrtllm",
            "max_batch_size": batch,
            "model_transaction_policy": {"decoupled": self.streaming},
            "dynamic_batching": {
                "preferred_batch_size": [batch],
                "max_queue_delay_microseconds": flags.get("max_queue_delay_microseconds", 0),
                "default_queue_policy": {"max_queue_size": flags.get("max_queue_size", 0)},
            },
            "input": list(_INPUTS),
            "output": list(_OUTPUTS),
            "instance_group": [{"count": 1, "kind": Name("KIND_CPU")}],
            "parameters": [{"key": key, "value": {"string_value": value}} for key, value in parameters.items()],
        }

    def inputs(self) -> dict[str, Any]:
        return {
            "models": [dump(self.config(index)) for index in range(len(self.names))],
            "engine": identity(self.engine_dir / "config.json"),
        }

    def files(self) -> Sequence[str]:
        return [f"{name}/config.pbtxt" for name in self.names]

    def check(self) -> None:
        read_engine(self.engine_dir)
        n = self.layout
        what = f"--triton_num_servers {n.n_servers} with {n.models_per_server} models each, {n.gpus_per_model} GPUs a model,"
        check_gpus(n.n_servers * n.models_per_server * n.gpus_per_model, what)

    def commands(self, target: Path) -> Sequence[Command]:
        return ()

    def describe(self) -> list[str]:
        return [f"# writes {self.output / name}" for name in self.files()]

    def make(self, target: Path, children: Children, log: Path) -> None:
        for index, name in enumerate(self.names):
            (target / name / MODEL_VERSION).mkdir(parents=True)
            (target / name / "config.pbtxt").write_text(dump(self.config(index)), encoding="utf-8")
            with log.open("a", encoding="utf-8") as file:
                file.write(f"{name}: engine {self.engine_dir}, GPUs {self.layout.gpus(self.models[index])}\n")
