"""The MLPerf Inference LLM workloads, as defaults of the options of a run.

Sources, all in mlcommons/inference (August 2026): ``language/<workload>/README.md`` (models, data sets),
``SUT.py`` and ``SUT_VLLM.py`` there (how answers are generated), ``dataset.py`` and ``evaluate-accuracy.py``
there (columns), and ``loadgen/mlperf.conf`` (LoadGen's names of the models). LoadGen itself brings latency
limits, sample counts and durations, in the mlperf.conf inside it; accuracy targets are in
`mpillm.submission.targets`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from disagg.errors import ConfigError, nearest
from mpillm import fields
from mpillm.configurator import Field
from mpillm.data.preprocessed import Columns

_STEP_TOKENS = 8192  # TensorRT-LLM's default of max_num_tokens: fits every prompt except llama3.1-405b's


@dataclass(frozen=True)
class Workload:
    """One benchmark. Lengths are in tokens."""

    name: str
    loadgen_model: str  # as mlperf.conf names it
    hf_model: str  # its name on Hugging Face
    model_path: str  # default folder, or a preset
    tensor_parallelism: int  # fewest GPUs of 141 GB that hold its weights in bf16, as a power of two
    dataset_path: str  # default: NVIDIA's folders
    frame_file: str  # MLCommons' name of its data frame
    columns: Columns
    n_samples: int
    max_input_len: int
    max_output_len: int
    end_ids: tuple[int, ...]
    min_output_len: int = 1
    stop_words: tuple[tuple[int, ...], ...] = ()  # as tokens; the data set says which samples have one
    scenarios: tuple[str, ...] = ("Offline", "Server")
    options: Mapping[str, Mapping[Field, Any]] = field(default_factory=dict)  # other defaults, by scenario
    scaled: str = ""  # what is smaller than in the benchmark; empty: nothing

    @property
    def title(self) -> str:
        """The name, with the scale if it is not full."""
        return f"{self.name} (tiny)" if self.scaled else self.name

    def defaults(self, scenario: str) -> dict[Field, Any]:
        """Return the options' defaults; answers are greedy. ConfigError for a scenario it does not have."""
        if scenario not in self.scenarios:
            have = " and ".join(self.scenarios)
            raise ConfigError(
                f"--scenarios {scenario}: {self.name} has {have}{nearest(scenario, self.scenarios)}",
                about=["scenarios"],
            )
        return {
            fields.model_path: self.model_path,
            fields.dataset_path: self.dataset_path,
            fields.max_num_tokens: _STEP_TOKENS,
            fields.enable_chunked_context: self.max_input_len > _STEP_TOKENS,
            fields.max_seq_len: self.max_input_len + self.max_output_len,
            fields.max_output_len: self.max_output_len,
            fields.min_output_len: self.min_output_len,
            fields.end_ids: self.end_ids,
            fields.stop_words: [list(word) for word in self.stop_words] or None,
            **dict.fromkeys(
                (fields.tensor_parallelism, fields.ctx_tp_size, fields.gen_tp_size), self.tensor_parallelism
            ),
            **self.options.get(scenario, {}),
        }


_LLAMA2 = Workload(
    name="llama2-70b",
    loadgen_model="llama2-70b",
    hf_model="meta-llama/Llama-2-70b-chat-hf",
    model_path="build/models/Llama-2-70b-chat-hf",
    tensor_parallelism=2,
    dataset_path="build/preprocessed_data/open_orca",
    frame_file="open_orca_gpt4_tokenized_llama.sampled_24576.pkl",
    columns=Columns("tok_input", "tok_input_length", references=("output",)),
    n_samples=24576,
    max_input_len=1024,
    max_output_len=1024,
    end_ids=(2,),
)
_LLAMA3 = Workload(
    name="llama3.1-405b",
    loadgen_model="llama3_1-405b",
    hf_model="meta-llama/Llama-3.1-405B-Instruct",
    model_path="build/models/Llama-3.1-405B-Instruct",
    tensor_parallelism=8,
    dataset_path="build/preprocessed_data/llama3.1-405b",
    frame_file="mlperf_llama3.1_405b_dataset_8313_processed_fp16_eval.pkl",
    columns=Columns("tok_input", "tok_input_len", references=("gt_output", "metric")),
    n_samples=8313,
    max_input_len=20000,
    max_output_len=2000,
    end_ids=(
        128001,
        128008,
        128009,
    ),  # of the model's generation_config.json, as the reference's vLLM reads it
)
WORKLOADS = {
    workload.name: workload
    for workload in (
        _LLAMA2,
        replace(
            _LLAMA2,
            name="llama2-70b-interactive",
            loadgen_model="llama2-70b-interactive",
            scenarios=("Server",),
        ),
        Workload(
            name="mixtral-8x7b",
            loadgen_model="mixtral-8x7b",
            hf_model="mistralai/Mixtral-8x7B-Instruct-v0.1",
            model_path="build/models/Mixtral-8x7B-Instruct-v0.1",
            tensor_parallelism=1,
            dataset_path="build/preprocessed_data/moe",
            frame_file="09292024_mixtral_15k_mintoken2_v1.pkl",
            columns=Columns(
                "tok_input", "tok_input_len", "tok_stop_sequence", ("dataset", "id", "input", "gt_output")
            ),
            n_samples=15000,
            max_input_len=2048,
            max_output_len=1024,
            min_output_len=2,
            end_ids=(2,),
            stop_words=((13, 13940, 28832, 13),),  # "\n```\n", which ends the code of MBXP's samples
        ),
        _LLAMA3,
        replace(
            _LLAMA3,
            name="llama3.1-405b-interactive",
            loadgen_model="llama3_1-405b-interactive",
            scenarios=("Server",),
        ),
    )
}
