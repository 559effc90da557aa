"""The record of a workload, the only source of its properties for all other packages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Metric = Literal["rouge", "openorca_gsm8k_mbxp", "long_context", "by_reference"]
"""Scoring method: name of a function in `mpillm.submission.scores`."""

FORM = "-interactive"
"""Suffix of an interactive form's names in NVIDIA's harness and LoadGen."""


@dataclass(frozen=True)
class Columns:
    """Names of columns in a published data frame."""

    tokens: str = "tok_input"
    lengths: str | None = None  # lengths of `tokens`, for a check
    stop_words: str | None = None  # tokens; a sample with only the end token has no stop word
    references: tuple[str, ...] = ()  # reference answers


@dataclass(frozen=True)
class Accuracy:
    """Scoring rules of a benchmark.

    A score must reach its reference times the accuracy target. The answers' length must be within bounds.
    """

    metric: Metric
    references: Mapping[str, float]  # by score
    length: str  # name of the length score: tokens_per_sample, or gen_len (characters of all answers)
    bounds: tuple[float, float]  # minimum and maximum
    evaluator: str = ""  # by_reference: the script in mlcommons/inference that prints the scores
    evaluator_options: tuple[str, str] = ("", "")  # of the script: for LoadGen's accuracy log, the data frame


@dataclass(frozen=True)
class LatencyLimits:
    """The submission checker's latency limits for a Server run."""

    ttft_ms: float
    tpot_ms: float
    target_ms: float  # for a whole answer, if user.conf sets a limit


@dataclass(frozen=True)
class Submission:
    """The submission checker's rules for a benchmark."""

    rounds: Mapping[str, tuple[str, ...]]  # the checker's names of the benchmark, by round
    limits: LatencyLimits | None  # for Server, and for Interactive in LoadGen's runs; None: it has neither
    scenarios: tuple[tuple[str, ...], ...]  # a closed submission needs one of each
    system_type: str = "datacenter"  # or edge
    draft_head: str = ""  # the only draft head that the interactive form may use; empty: none
    two_targets: bool = False  # accuracy targets of 99 % and 99.9 %; the names contain the target
    interactive: LatencyLimits | None = None  # for Interactive in results of MLCommons' client

    def limits_of(self, scenario: str) -> LatencyLimits | None:
        """Return the limits of a run with MLCommons' client; None if there are none."""
        return self.interactive or self.limits if scenario == "Interactive" else self.limits


@dataclass(frozen=True)
class Endpoints:
    """MLPerf Endpoints' names of a workload and of its data set."""

    model: str
    dataset: str
    link_to_model: str
    dataset_link: str


@dataclass(frozen=True)
class Workload:
    """A benchmark. Lengths are in tokens."""

    name: str
    aliases: tuple[str, ...]  # NVIDIA's and LoadGen's names
    members: tuple[str, ...]  # names in `Benchmark`, for a configuration in Python
    loadgen_model: str  # name in mlperf.conf
    hf_model: str  # name on Hugging Face
    architecture: str  # in its config.json
    model_path: str  # default folder, or a preset
    tensor_parallelism: int  # minimum GPUs of 141 GB for its weights in bf16, as a power of two
    dataset_path: str  # default: NVIDIA's folders
    frame_file: str  # MLCommons' name of the data frame
    columns: Columns
    n_samples: int
    max_input_len: int
    max_output_len: int
    end_ids: tuple[int, ...]
    accuracy: Accuracy
    submission: Submission
    tiny_model: str  # the preset of --model_scale tiny
    tiny_divisor: int  # divides the prompts' lengths
    min_output_len: int = 1
    stop_words: tuple[tuple[int, ...], ...] = ()  # tokens; the data set assigns them to samples
    scenarios: tuple[str, ...] = ("Offline", "Server")
    sampling: Mapping[str, float] = field(default_factory=dict)  # options; empty: answers are greedy
    compliance: tuple[str, ...] = ("TEST06",)  # tests that the closed division requires
    # If an accuracy run has another data set: its samples, and the maximum output length.
    accuracy_samples: int | None = None
    accuracy_output_len: int | None = None
    endpoints: Endpoints | None = None  # None: not in MLPerf Endpoints
    interactive_of: str = ""  # name of the plain form, if this is an interactive form
    loadgen: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # options, by scenario
    scaled: str = ""  # differences from the full benchmark; empty: none

    def benchmark(self, accuracy_target: float) -> str:
        """Return the submission checker's name; for some benchmarks it contains the accuracy target."""
        name = self.interactive_of or self.name
        return f"{name}-{100 * accuracy_target:g}" if self.submission.two_targets else name

    @property
    def title(self) -> str:
        """The name, with the scale if it is not full."""
        return f"{self.name} (tiny)" if self.scaled else self.name

    @property
    def has_interactive_form(self) -> bool:
        return any("Interactive" in either for either in self.submission.scenarios)

    def interactive(self) -> Workload:
        """Return the interactive form: Server with stricter limits, and another LoadGen model."""
        return replace(
            self,
            name=self.name + FORM,
            aliases=tuple(alias + FORM for alias in self.aliases),
            members=(f"{self.members[0]}_INTERACTIVE",),
            loadgen_model=self.loadgen_model + FORM,
            scenarios=("Server",),
            endpoints=None,
            interactive_of=self.name,
        )
