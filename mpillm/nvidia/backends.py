"""Configurations of backends: classes that the configurator fills from fields and TensorRT-LLM's files.

`mitten.configured(cls, config)` creates one from a command's values, `cls()` from the active configuration.
Each checks the consistency of its values and raises ConfigError before anything starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from disagg.errors import ConfigError, about
from mpillm.options.fields import AllFields
from mpillm.options.fields.runtime_flags import BUILD_OPTIONS, RUNTIME_FLAGS
from mpillm.options.flags import check_limits, limits_of_engine
from mpillm.options.mitten import autoconfigure, bind, overlaid
from mpillm.programs.load_clients.kinds import CONVERSATIONS

if TYPE_CHECKING:  # its import takes time at the start of every rank
    from mpillm.options.generation_config import GenerationConfig


@autoconfigure
@bind(AllFields.core_type)
@bind(AllFields.benchmarks)
@bind(AllFields.scenarios)
@bind(AllFields.harness, "load_client")
@bind(AllFields.tensor_parallelism)
@bind(AllFields.pipeline_parallelism)
@bind(AllFields.moe_expert_parallelism)
@bind(AllFields.traffic_distribution_policy)
@bind(AllFields.show_steady_state_progress)
@bind(AllFields.llm_gen_config_path, "gen_config_path")
@bind(AllFields.log_dir)
@bind(AllFields.seed, "random_seed")
@bind(AllFields.stall_timeout)
@dataclass
class HarnessConfig:
    """Common configuration of all backends."""

    core_type: str = AllFields.core_type.default
    benchmarks: tuple[str, ...] = ()
    scenarios: tuple[str, ...] = ("Offline",)
    load_client: str | None = None
    tensor_parallelism: int = 1
    pipeline_parallelism: int = 1
    moe_expert_parallelism: int = 1
    traffic_distribution_policy: str = "load_balancing"
    show_steady_state_progress: bool = False
    gen_config_path: str | None = None
    log_dir: str | None = None
    random_seed: int = 0
    stall_timeout: float = AllFields.stall_timeout.default  # seconds
    # None: no file; the options of group generation and the model's own end tokens apply
    gen_config: GenerationConfig | None = None

    def __post_init__(self) -> None:
        if self.gen_config is None and self.gen_config_path:
            from mpillm.options.generation_config import GenerationConfig

            self.gen_config = GenerationConfig.from_file(self.gen_config_path)

    @property
    def streaming(self) -> bool:
        """True if first tokens are reported early: in conversations, and in all scenarios except Offline."""
        measured = self.scenarios != ("Offline",) or self.load_client == CONVERSATIONS
        return measured and (self.gen_config is None or self.gen_config.streaming)


@autoconfigure
@bind(AllFields.trtllm_checkpoint_flags, "checkpoint_flags")
@bind(AllFields.trtllm_build_flags, "build_flags")
@bind(AllFields.trtllm_runtime_flags, "runtime_flags")
@dataclass
class TrtllmHarnessConfig(HarnessConfig):
    """Effective flags, also for mpillm's own cores.

    TRTLLM_RUNTIME_FLAGS overrides --trtllm_runtime_flags, which override the defaults.
    """

    checkpoint_flags: dict[str, Any] = field(default_factory=dict)
    build_flags: dict[str, Any] = field(default_factory=dict)
    runtime_flags: dict[str, Any] = field(default_factory=dict)

    DEFAULT_RUNTIME_FLAGS: ClassVar[dict[str, Any]] = {
        n: f.default for n, f in RUNTIME_FLAGS.items() if f.default is not None
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        flags = overlaid(AllFields.trtllm_runtime_flags, self.runtime_flags)
        self.runtime_flags = self.DEFAULT_RUNTIME_FLAGS | flags
        for name in BUILD_OPTIONS:
            value, flag = getattr(self, name), self.build_flags.get(name)
            if flag is not None and flag != value:
                raise ConfigError(
                    f"trtllm_build_flags {name} is {flag}, but {name} is {value}",
                    about=["trtllm_build_flags", name],
                )
        with about("trtllm_build_flags"):
            self._fit(self.build_flags, "trtllm_build_flags")

    def _fit(self, built: Mapping[str, Any], of: str) -> None:
        check_limits(self.runtime_flags, built, of)
        self.runtime_flags |= limits_of_engine(self.runtime_flags, built)
