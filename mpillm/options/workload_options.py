"""The defaults that a workload gives options."""

from __future__ import annotations

from typing import Any

from mpillm.options.field import Field
from mpillm.options.fields import BY_NAME, AllFields
from mpillm.workloads import Workload

_STEP_TOKENS = 8192  # TensorRT-LLM's default of max_num_tokens: fits every prompt except llama3.1-405b's


def defaults_of(workload: Workload, scenario: str, test_mode: str = "PerformanceOnly") -> dict[Field, Any]:
    """Return a workload's defaults; answers are greedy, unless the workload specifies sampling.

    Every workload accepts every scenario, as in NVIDIA's harness: submitters publish configuration files for
    SingleStream, and for interactive forms in Offline. A run reports scenarios that no MLPerf round has.
    """
    longest = workload.max_output_len
    if test_mode == "AccuracyOnly":
        longest = workload.accuracy_output_len or longest
    return {
        AllFields.model_path: workload.model_path,
        AllFields.dataset_path: workload.dataset_path,
        AllFields.max_num_tokens: _STEP_TOKENS,
        AllFields.enable_chunked_context: workload.max_input_len > _STEP_TOKENS,
        AllFields.max_seq_len: workload.max_input_len + longest,
        AllFields.max_output_len: longest,
        AllFields.min_output_len: workload.min_output_len,
        AllFields.end_ids: workload.end_ids,
        AllFields.stop_words: [list(word) for word in workload.stop_words] or None,
        **dict.fromkeys(
            (AllFields.tensor_parallelism, AllFields.ctx_tp_size, AllFields.gen_tp_size),
            workload.tensor_parallelism,
        ),
        **{BY_NAME[name]: value for name, value in workload.sampling.items()},
        **{BY_NAME[name]: value for name, value in workload.loadgen.get(scenario, {}).items()},
    }
