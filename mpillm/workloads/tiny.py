"""``--model_scale tiny``: a workload for any machine that runs the code of the full workload.

The model is a preset with random weights. The data set is generated in the published format. LoadGen records
the reduced sample count and duration. Everything else equals the benchmark: LoadGen's name of the model, and
so its latency limits, the loader, the handling of end and stop tokens, and the columns.
"""

from __future__ import annotations

from dataclasses import replace

from mpillm.workloads.early_stopping import SERVER_PERCENTILE, SINGLE_STREAM_PERCENTILE, queries_needed
from mpillm.workloads.workload import Workload

# Divisors.
_SAMPLES = 512
_ANSWER_TOKENS = 64
_VOCAB_SIZE, _END_ID = 512, 257  # of the presets tiny-llama and tiny-mixtral
_QPS = 10.0
_QUERIES = queries_needed(SERVER_PERCENTILE)
_SINGLE_STREAM_QUERIES = queries_needed(SINGLE_STREAM_PERCENTILE, late=1)


def tiny(workload: Workload) -> Workload:
    """Return a scaled-down workload. `data.tiny_dataset` writes its data set."""
    model = workload.tiny_model
    small = replace(
        workload,
        model_path=model,
        tensor_parallelism=1,
        dataset_path="",
        n_samples=workload.n_samples // _SAMPLES,
        max_input_len=workload.max_input_len // workload.tiny_divisor,
        max_output_len=workload.max_output_len // _ANSWER_TOKENS,
        end_ids=(_END_ID,),
        accuracy_samples=None,
        accuracy_output_len=None,
        stop_words=tuple(tuple(token % _VOCAB_SIZE for token in word) for word in workload.stop_words),
        loadgen={
            "Offline": {"min_duration": 0.0, "min_query_count": workload.n_samples // _SAMPLES},
            "SingleStream": {"min_duration": 0.0, "min_query_count": _SINGLE_STREAM_QUERIES},
            "Server": {"min_duration": 0.0, "min_query_count": _QUERIES, "server_target_qps": _QPS},
        },
    )
    return replace(
        small,
        scaled=f"model {model} with random weights instead of {workload.hf_model},"
        f" {small.n_samples} generated samples instead of {workload.n_samples},"
        f" prompts to {small.max_input_len} tokens instead of {workload.max_input_len},"
        f" answers to {small.max_output_len} instead of {workload.max_output_len},"
        f" token ids below {_VOCAB_SIZE};"
        " LoadGen: performance_sample_count, min_query_count, min_duration",
    )
