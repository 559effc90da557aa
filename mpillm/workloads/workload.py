"""What a workload is: one record, which every other room reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Metric = Literal["rouge", "openorca_gsm8k_mbxp", "long_context", "by_reference"]
"""How answers are scored: the names of the functions in `mpillm.submission.scores`."""

FORM = "-interactive"
"""The end of an interactive form's names, NVIDIA's and LoadGen's alike."""


@dataclass(frozen=True)
class Columns:
    """The names of a published data frame's columns."""

    tokens: str = "tok_input"
    lengths: str | None = None  # of `tokens`, as a check
    stop_words: str | None = None  # as tokens; a sample with only the end token has none
    references: tuple[str, ...] = ()  # which answers are scored against


@dataclass(frozen=True)
class Accuracy:
    """How a benchmark is scored.

    A score must reach its reference times the accuracy target; the answers' length must be within bounds.
    """

    metric: Metric
    references: Mapping[str, float]  # by the scores' names
    length: str  # the name of the score that bounds it: tokens_per_sample, gen_len (characters of all)
    bounds: tuple[float, float]  # least and most
    evaluator: str = ""  # by_reference: the script in mlcommons/inference whose output has the scores


@dataclass(frozen=True)
class LatencyLimits:
    """The latencies that the submission checker allows a Server run."""

    ttft_ms: float
    tpot_ms: float
    target_ms: float  # of a whole answer, if user.conf sets one


@dataclass(frozen=True)
class Submission:
    """What the submission checker has of a benchmark."""

    rounds: Mapping[str, tuple[str, ...]]  # its names of the benchmark, by round
    limits: LatencyLimits  # of Server; of LoadGen's runs those of Interactive, too
    scenarios: tuple[tuple[str, ...], ...]  # a closed datacenter submission needs one of each
    # The only head that its interactive form may guess tokens with (speculative decoding); "": none
    draft_head: str = ""
    two_targets: bool = False  # accuracy targets of 99 % and 99.9 %: its names contain the target
    interactive: LatencyLimits | None = (
        None  # of Interactive, in results of MLCommons' client; None: it has none
    )

    def limits_of(self, scenario: str) -> LatencyLimits:
        """Return the limits of a run of MLCommons' client."""
        return self.interactive or self.limits if scenario == "Interactive" else self.limits


@dataclass(frozen=True)
class Endpoints:
    """How MLPerf Endpoints names a workload, and the data set that its points are measured with."""

    model: str
    dataset: str
    link_to_model: str
    dataset_link: str


@dataclass(frozen=True)
class Workload:
    """One benchmark. Lengths are in tokens."""

    name: str
    aliases: tuple[str, ...]  # NVIDIA's and LoadGen's names of it
    members: tuple[str, ...]  # names in `Benchmark`, for a configuration in Python
    loadgen_model: str  # as mlperf.conf names it
    hf_model: str  # its name on Hugging Face
    architecture: str  # in its config.json
    model_path: str  # default folder, or a preset
    tensor_parallelism: int  # fewest GPUs of 141 GB that hold its weights in bf16, as a power of two
    dataset_path: str  # default: NVIDIA's folders
    frame_file: str  # MLCommons' name of its data frame
    columns: Columns
    n_samples: int
    max_input_len: int
    max_output_len: int
    end_ids: tuple[int, ...]
    accuracy: Accuracy
    submission: Submission
    tiny_model: str  # the preset of --model_scale tiny
    tiny_divisor: int  # of a prompt's length there
    min_output_len: int = 1
    stop_words: tuple[tuple[int, ...], ...] = ()  # as tokens; the data set says which samples have one
    scenarios: tuple[str, ...] = ("Offline", "Server")
    sampling: Mapping[str, float] = field(default_factory=dict)  # options; empty: answers are greedy
    compliance: tuple[str, ...] = ("TEST06",)  # the tests that the closed division asks for
    # If an accuracy run has a data set of its own: its samples, and the longest answer there.
    accuracy_samples: int | None = None
    accuracy_output_len: int | None = None
    endpoints: Endpoints | None = None  # if MLPerf Endpoints has it
    interactive_of: str = ""  # the workload of which this is the interactive form
    loadgen: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # options, by scenario
    scaled: str = ""  # what is smaller than in the benchmark; empty: nothing

    def benchmark(self, accuracy_target: float) -> str:
        """Return the submission checker's name of it, which for some contains the accuracy target."""
        name = self.interactive_of or self.name
        return f"{name}-{100 * accuracy_target:g}" if self.submission.two_targets else name

    @property
    def title(self) -> str:
        """The name, with the scale if it is not full."""
        return f"{self.name} (tiny)" if self.scaled else self.name

    def interactive(self) -> Workload:
        """Return its interactive form: Server with stricter limits, a LoadGen model of its own."""
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
