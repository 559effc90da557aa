"""Generate model repositories in the form of TensorRT-LLM's backend for Triton, one per `tritonserver`."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError, about, nearest
from launch.children import Children
from launch.command import Command, NotHere
from mpillm.data.model_files import BuildConfig
from mpillm.devices import visible_gpus
from mpillm.nvidia.configs import ENGINE_MODEL, TritonHarnessConfig, model_name
from mpillm.nvidia.flags import TRITON_OTHERS, TRITON_PARAMETERS
from mpillm.options.mitten import configured
from mpillm.options.run_config import RunConfig
from mpillm.stages.operation import Operation, identity, log_of, read_stamp
from mpillm.triton.embedded import PYTHON, embedded_parameters, model_program
from mpillm.triton.parameters import unused_parameters
from mpillm.triton.pbtxt import EnumName, dump
from mpillm.triton.tensors import TENSORRT_LLM_INPUTS, TENSORRT_LLM_OUTPUTS, tensors
from mpillm.triton.text_models import text_models, texts
from mpillm.trtllm.engines import TRTLLMBuilderOp, TRTLLMLibraryLoader, read_engine
from mpillm.trtllm.installed import check_engines, check_gpus

MODEL_VERSION = "1"

_SOURCE = "--trtllm_runtime_flags"

_POLICIES = {"max_util": "max_utilization", "no_evict": "guaranteed_no_evict"}
# Runtime flags whose parameter of the `tensorrt_llm` model has another name.
_RENAMED = {
    "kvcache_free_gpu_mem_frac": "kv_cache_free_gpu_mem_fraction",
    "exclude_input_from_output": "exclude_input_in_output",
    "encoder_engine_dir": "encoder_model_path",
}
_EXPECTED = {bool: "true or false", int: "a whole number of at least 0", float: "a number"}
_CHOICES: Mapping[str, Sequence[str]] = {
    "decoding_mode": (
        "top_k",
        "top_p",
        "top_k_top_p",
        "beam_search",
        "medusa",
        "redrafter",
        "lookahead",
        "eagle",
    ),
    "guided_decoding_backend": ("xgrammar",),
    "triton_backend": ("tensorrtllm", PYTHON),
}
_LOOKAHEAD = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
# The backend reads these unconditionally and does not load without them. The template's placeholder counts as
# "no value".
_NEEDED = ("tokenizer_dir", "xgrammar_tokenizer_info_path", "guided_decoding_backend")

_ALONE = (
    "the repository has only the tensorrt_llm model; --triton_text_models, with the embedded engine, writes"
    " the others; docs/howto/pipeline.md describes TensorRT-LLM's"
)
# Instance counts of the models around the engine's model (--triton_text_models).
_COUNTS = {
    "preprocessing_instance_count": "preprocessing",
    "postprocessing_instance_count": "postprocessing",
    "bls_instance_count": "tensorrt_llm_bls",
}
_NO_TENSOR = "our tensorrt_llm model has no such tensor"
_REFUSED = {
    "engine_dir": "name the engine with --engine_dir",
    "gpu_device_ids": "the GPUs follow from the engine's ranks and --triton_num_servers",
    "encoder_input_features_data_type": _NO_TENSOR,
    "logits_datatype": _NO_TENSOR,
    "prompt_embedding_table_data_type": _NO_TENSOR,
    **dict.fromkeys(_COUNTS, _ALONE),
}


@dataclass(frozen=True)
class TritonLayout:
    """The number of servers, models per server, and GPUs per model."""

    n_servers: int
    models_per_server: int
    gpus_per_model: int

    def gpus(self, model: int) -> range:
        """Return the GPUs of a model, counted over all servers."""
        return range(model * self.gpus_per_model, (model + 1) * self.gpus_per_model)


def triton_layout(
    scenario: str, gpus_per_model: int, n_servers: int | None, models_per_server: int | None
) -> TritonLayout:
    """Fill in missing numbers by the GPUs: in Offline one server for all models, otherwise one per model."""
    gpus = visible_gpus()
    models = max(1, len(gpus) // gpus_per_model) if gpus else None
    if n_servers is None and models_per_server is None:
        n_servers = 1 if scenario == "Offline" or models is None else models
    if models_per_server is None:
        assert n_servers is not None
        models_per_server = 1 if models is None else models // n_servers
        if models is not None and models % n_servers:
            raise ConfigError(
                f"--triton_num_servers {n_servers}: must divide {models}, the number of models that fit"
                f" {len(gpus or ())} GPUs",
                about=["triton_num_servers"],
            )
    elif n_servers is None:
        n_servers = 1 if models is None else max(1, models // models_per_server)
    return TritonLayout(n_servers, models_per_server, gpus_per_model)


def model_parameters(flags: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters of the `tensorrt_llm` model, as text, from runtime flags.

    Raises ConfigError if one is wrong.
    """
    set_flags = {name: value for name, value in flags.items() if value is not None}
    parameters = {name: f"${{{name}}}" for name in _NEEDED}
    for name, value in set_flags.items():
        _check(name, value)
        if name in TRITON_OTHERS:
            continue
        if name == "batch_scheduler_policy":
            value = _POLICIES[value]
        if name == "xgrammar_tokenizer_info_path":
            value = Path(str(value)).absolute()  # tritonserver may be started elsewhere
        parameters[_RENAMED.get(name, name)] = str(value).lower() if isinstance(value, bool) else str(value)
    lacking = [name for name in _LOOKAHEAD if name not in set_flags]
    if set_flags.get("decoding_mode") == "lookahead" and lacking:
        raise ConfigError(f"{_SOURCE}: decoding_mode lookahead needs {' and '.join(lacking)}")
    return parameters


def _check(name: str, value: Any) -> None:
    if name in _REFUSED:
        raise ConfigError(f"{_SOURCE}: {name}: {_REFUSED[name]}")
    if name not in TRITON_PARAMETERS:
        if name in TRITON_OTHERS:
            return  # checked by the harness
        known = (*TRITON_PARAMETERS, *TRITON_OTHERS)
        raise ConfigError(
            f"{_SOURCE}: Triton's tensorrt_llm model has no parameter '{name}'{nearest(name, known)}"
        )
    kind = TRITON_PARAMETERS[name]
    numbers = (int, float) if kind is float else (kind,)
    if kind is not str and (type(value) not in numbers or (kind is int and value < 0)):
        raise ConfigError(f"{_SOURCE}: {name} {value}: expected {_EXPECTED[kind]}")
    if name == "batch_scheduler_policy" and value not in _POLICIES:
        raise ConfigError(
            f"{_SOURCE}: batch_scheduler_policy {value}: Triton's backend has {' and '.join(_POLICIES)}"
        )
    if name in _CHOICES and value not in _CHOICES[name]:
        choices = _CHOICES[name]
        raise ConfigError(
            f"{_SOURCE}: {name} {value}: not one of {', '.join(choices)}{nearest(str(value), choices)}"
        )


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
        embedded: Mapping[str, str] | None = None,
        with_text: bool = False,
    ) -> None:
        """`engine`: its build configuration; `runtime_flags`: include the build flags' limits.

        `embedded`: parameters of the embedded engine; None for TensorRT-LLM's. `with_text`: write the models
        around the engine's model.
        """
        self.engine_dir = Path(engine_dir).absolute()  # tritonserver may be started elsewhere
        self.embedded = embedded
        self.with_text = with_text
        self.engine = engine
        self.output = Path(f"{repo}_{server}")
        self.layout = layout
        self.models = [server * layout.models_per_server + k for k in range(layout.models_per_server)]
        self.names = (
            [ENGINE_MODEL] if with_text else [model_name(benchmark, scenario, model) for model in self.models]
        )
        self.scenario = scenario
        self.streaming = streaming
        self.runtime_flags = runtime_flags
        counts = _COUNTS if with_text else {}
        self.engine_flags = {name: value for name, value in runtime_flags.items() if name not in counts}

    @about("trtllm_runtime_flags")
    def config(self, index: int) -> dict[str, Any]:
        """Return the `config.pbtxt` of the repository's model `index`."""
        build, flags = self.engine, self.engine_flags
        set_parameters = model_parameters(flags)  # also checks the flags
        batch = flags.get("max_batch_size") or build.max_batch_size
        for name, run, built in (
            ("max_batch_size", batch, build.max_batch_size),
            ("max_beam_width", flags.get("max_beam_width") or 1, build.max_beam_width),
        ):
            if run > built:
                raise ConfigError(f"{name} {run}: the engine in {self.engine_dir} was built for {built}")
        decoupled = flags.get("decoupled_mode", self.streaming)
        if self.streaming and not decoupled:
            raise ConfigError(
                f"{_SOURCE}: decoupled_mode false: {self.scenario} streams tokens, which a model does only"
                " when it is decoupled"
            )
        parameters = {
            "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
            "gpt_model_type": "inflight_fused_batching" if flags.get("use_inflight_batching", True) else "V1",
            "gpt_model_path": str(self.engine_dir),
            "max_beam_width": str(build.max_beam_width),
            **set_parameters,
            **(self.embedded or {}),
            "gpu_device_ids": ",".join(map(str, self.layout.gpus(self.models[index]))),
        }
        return {
            "name": self.names[index],
            "backend": "tensorrtllm" if self.embedded is None else PYTHON,
            "max_batch_size": batch,
            "model_transaction_policy": {"decoupled": decoupled},
            "dynamic_batching": {
                "preferred_batch_size": [batch],
                "max_queue_delay_microseconds": flags.get("max_queue_delay_microseconds", 0),
                "default_queue_policy": {"max_queue_size": flags.get("max_queue_size", 0)},
            },
            "input": tensors(TENSORRT_LLM_INPUTS),
            "output": tensors(TENSORRT_LLM_OUTPUTS),
            "instance_group": [{"count": 1, "kind": EnumName("KIND_CPU")}],
            "parameters": texts(parameters),
        }

    def configs(self) -> dict[str, dict[str, Any]]:
        """Return the `config.pbtxt` of each model, by model name."""
        configs = {name: self.config(index) for index, name in enumerate(self.names)}
        if self.with_text:
            assert self.embedded is not None
            (engine,) = configs.values()
            configs |= text_models(
                engine["max_batch_size"],
                engine["model_transaction_policy"]["decoupled"],
                self.embedded["tokenizer_dir"],
                {model: self._count(flag) for flag, model in _COUNTS.items()},
            )
        return configs

    @about("trtllm_runtime_flags")
    def _count(self, flag: str) -> int:
        """Return the number of instances of a model."""
        count = self.runtime_flags.get(flag, 1)
        if type(count) is not int or count < 1:
            raise ConfigError(f"{_SOURCE}: {flag} {count}: expected a whole number of at least 1")
        return count

    def unused_parameters(self) -> str:
        """Return a line that lists the parameters without effect on the embedded engine, or ""."""
        if self.embedded is None:
            return ""
        parameters = {one["key"]: one["value"]["string_value"] for one in self.config(0)["parameters"]}
        return unused_parameters(parameters)

    def inputs(self) -> dict[str, Any]:
        return {
            "models": [dump(config) for config in self.configs().values()],
            "engine": None if self.embedded else identity(self.engine_dir / "config.json"),
        }

    def files(self) -> Sequence[str]:
        return [f"{name}/config.pbtxt" for name in self.configs()]

    def check(self) -> None:
        if self.embedded is None:
            read_engine(self.engine_dir)
        info = self.runtime_flags.get("xgrammar_tokenizer_info_path")
        if info is not None and not Path(str(info)).is_file():
            raise NotHere(f"{_SOURCE}: xgrammar_tokenizer_info_path {info}: no such file")
        n = self.layout
        source = (
            f"--triton_num_servers {n.n_servers} with {n.models_per_server} models each,"
            f" {n.gpus_per_model} GPUs a model,"
        )
        if self.embedded is None:
            check_gpus(n.n_servers * n.models_per_server * n.gpus_per_model, source)

    def commands(self, target: Path) -> Sequence[Command]:
        return ()

    def describe(self) -> list[str]:
        return [f"# writes {self.output / name}" for name in self.files()]

    def make(self, target: Path, children: Children, log: Path) -> None:
        for name, config in self.configs().items():
            version = target / name / MODEL_VERSION
            version.mkdir(parents=True)
            (target / name / "config.pbtxt").write_text(dump(config), encoding="utf-8")
            if program := model_program(config):
                (version / "model.py").write_text(program, encoding="utf-8")
        with log.open("a", encoding="utf-8") as file:
            for name, model in zip(self.names, self.models, strict=True):
                file.write(f"{name}: engine {self.engine_dir}, GPUs {self.layout.gpus(model)}\n")


def triton_stages(config: RunConfig) -> list[GenerateTritonConfigOp]:
    """Return the stages of a test's model repositories, one per server. A dry run may assume an engine."""
    if len(config.scenarios) > 1 or len(config.benchmarks or ()) > 1:
        raise ConfigError(
            "generate-triton-config makes the repositories of one test: name one workload and one scenario"
        )
    harness = configured(TritonHarnessConfig, config)
    with_text, embedded = config.triton_text_models, None
    if harness.runtime_flags.get("triton_backend") == PYTHON:
        engine_dir, build, gpus_per_model, embedded = embedded_parameters(config)
    elif with_text:
        raise ConfigError(
            "--triton_text_models: these models call the embedded engine (--trtllm_runtime_flags"
            f" triton_backend:{PYTHON}); docs/howto/pipeline.md describes TensorRT-LLM's",
            about=["triton_text_models"],
        )
    else:
        engine_dir, build, gpus_per_model = _trtllm_engine(config, harness)
    layout = triton_layout(
        config.scenario,
        gpus_per_model,
        harness.num_servers,
        1 if with_text and harness.models_per_server is None else harness.models_per_server,
    )
    if with_text and layout.models_per_server > 1:
        raise ConfigError(
            f"--triton_text_models: a server has them for one model, not {layout.models_per_server}"
            " (--triton_num_models_per_server)",
            about=["triton_text_models", "triton_num_models_per_server"],
        )
    return [
        GenerateTritonConfigOp(
            engine_dir=engine_dir,
            engine=build,
            repo=harness.model_repo,
            server=server,
            layout=layout,
            benchmark=config.benchmark or Path(config.model_path or engine_dir).name,
            scenario=config.scenario,
            streaming=harness.streaming,
            runtime_flags={"enable_kv_cache_reuse": config.enable_kv_cache_reuse, **harness.runtime_flags},
            embedded=embedded,
            with_text=with_text,
        )
        for server in range(layout.n_servers)
    ]


def _trtllm_engine(config: RunConfig, harness: TritonHarnessConfig) -> tuple[str, BuildConfig, int]:
    """Return the folder of TensorRT-LLM's engine, its build configuration, and its ranks."""
    check_engines("generate-triton-config")
    engine_dir = config.engine_dir
    if not engine_dir:
        if not config.model_path:
            raise ConfigError(
                "generate-triton-config needs --engine_dir, or the --model_path that generate-engines"
                " was given"
            )
        engine_dir = str(configured(TRTLLMBuilderOp, config).output)
    try:
        build, cut = read_engine(Path(engine_dir))
    except NotHere:
        if not config.dry_run:
            raise
        cut = configured(TRTLLMLibraryLoader, config).layout
        build = BuildConfig.from_json(harness.runtime_flags | harness.build_flags, "--trtllm_build_flags")
        print(f"# assumed: {engine_dir}, an engine of {cut} (from the options)")
    return engine_dir, build, cut.ranks


def remove_repositories(repo: str, first: int) -> None:
    """Remove repositories from server `first` on, left by a test with more servers; they would be started."""
    while read_stamp(old := Path(f"{repo}_{first}")):
        shutil.rmtree(old)
        log_of(old).unlink(missing_ok=True)
        print(f"  removed {old}: there are fewer servers now")
        first += 1
