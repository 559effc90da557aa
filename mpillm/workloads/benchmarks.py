"""The MLPerf Inference LLM workloads. One `Workload(…)` has all properties of a benchmark.

Sources in mlcommons/inference (August 2026):

- ``language/<workload>/README.md``: models, data sets, reference accuracy
- ``SUT.py``, ``SUT_VLLM.py`` and deepseek-r1's ``utils/backend_registry.py`` there: generation of answers
- ``dataset.py`` and ``evaluate-accuracy.py`` there: columns, scores
- ``loadgen/mlperf.conf``: LoadGen's names of the models
- ``tools/submission/submission_checker/constants.py``: rounds v6.0 and v6.1 with targets, limits, scenarios

Draft heads: ``inference_rules.adoc`` in mlcommons/inference_policies, appendix Speculative Decoding.
LoadGen's own mlperf.conf has latency limits, sample counts and durations.
"""

from __future__ import annotations

from dataclasses import replace

from mpillm.workloads.workload import Accuracy, Columns, Endpoints, LatencyLimits, Submission, Workload

LLAMA2_70B = Workload(
    name="llama2-70b",
    aliases=("llama2", "llama-v2", "llama-v2-70b"),
    members=("LLAMA2",),
    loadgen_model="llama2-70b",
    hf_model="meta-llama/Llama-2-70b-chat-hf",
    architecture="LlamaForCausalLM",
    model_path="build/models/Llama-2-70b-chat-hf",
    tensor_parallelism=2,
    dataset_path="build/preprocessed_data/open_orca",
    frame_file="open_orca_gpt4_tokenized_llama.sampled_24576.pkl",
    columns=Columns("tok_input", "tok_input_length", references=("output",)),
    n_samples=24576,
    max_input_len=1024,
    max_output_len=1024,
    end_ids=(2,),
    accuracy=Accuracy(
        metric="rouge",
        references={"rouge1": 44.4312, "rouge2": 22.0352, "rougeL": 28.6162},
        length="tokens_per_sample",
        bounds=(0.9 * 294.45, 1.1 * 294.45),
    ),
    submission=Submission(
        rounds={"v6.0": ("llama2-70b-99", "llama2-70b-99.9"), "v6.1": ("llama2-70b-99.9",)},
        limits=LatencyLimits(ttft_ms=2000, tpot_ms=200, target_ms=20_000),
        scenarios=(("Offline",), ("Server", "Interactive")),
        two_targets=True,
    ),
    tiny_model="tiny-llama",
    tiny_divisor=16,
)

MIXTRAL_8X7B = Workload(
    name="mixtral-8x7b",
    aliases=("mixtral", "mixtral8x7b", "moe"),
    members=("MIXTRAL8X7B", "Mixtral8x7B"),  # the second is NVIDIA's spelling
    loadgen_model="mixtral-8x7b",
    hf_model="mistralai/Mixtral-8x7B-Instruct-v0.1",
    architecture="MixtralForCausalLM",
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
    accuracy=Accuracy(
        metric="openorca_gsm8k_mbxp",
        references={"rouge1": 45.5989, "rouge2": 23.3526, "rougeL": 30.4608, "gsm8k": 73.66, "mbxp": 60.16},
        length="tokens_per_sample",
        bounds=(0.9 * 144.84, 1.1 * 145.9),
    ),
    submission=Submission(
        rounds={"v6.0": ("mixtral-8x7b",)},
        limits=LatencyLimits(ttft_ms=2000, tpot_ms=200, target_ms=20_000),
        scenarios=(("Offline",), ("Server",)),
    ),
    tiny_model="tiny-mixtral",
    tiny_divisor=16,
)

LLAMA3_1_405B = Workload(
    name="llama3.1-405b",
    aliases=("llama3_1-405b", "llama-v3.1-405b"),
    members=("LLAMA3_1_405B", "LLAMA3_1"),  # the second is NVIDIA's, when there was one of them
    loadgen_model="llama3_1-405b",
    hf_model="meta-llama/Llama-3.1-405B-Instruct",
    architecture="LlamaForCausalLM",
    model_path="build/models/Llama-3.1-405B-Instruct",
    tensor_parallelism=8,
    dataset_path="build/preprocessed_data/llama3.1-405b",
    frame_file="mlperf_llama3.1_405b_dataset_8313_processed_fp16_eval.pkl",
    columns=Columns("tok_input", "tok_input_len", references=("gt_output", "metric")),
    n_samples=8313,
    max_input_len=20000,
    max_output_len=2000,
    # From the model's generation_config.json, which the reference's vLLM reads.
    end_ids=(128001, 128008, 128009),
    accuracy=Accuracy(
        metric="long_context",
        references={"rougeL": 21.6666, "exact_match": 90.1335},
        length="tokens_per_sample",
        bounds=(0.9 * 684.68, 1.1 * 684.68),
    ),
    submission=Submission(
        rounds={"v6.0": ("llama3.1-405b",)},
        limits=LatencyLimits(ttft_ms=6000, tpot_ms=175, target_ms=60_000),
        scenarios=(("Offline",), ("Server", "Interactive")),
    ),
    tiny_model="tiny-llama",
    tiny_divisor=64,
)

LLAMA3_1_8B = Workload(
    name="llama3.1-8b",
    aliases=("llama3_1-8b", "llama-v3.1-8b"),
    members=("LLAMA3_1_8B",),
    loadgen_model="llama3_1-8b",
    hf_model="meta-llama/Llama-3.1-8B-Instruct",
    architecture="LlamaForCausalLM",
    model_path="build/models/Llama-3.1-8B-Instruct",
    tensor_parallelism=1,
    dataset_path="build/preprocessed_data/llama3.1-8b",
    frame_file="cnn_eval.json",
    columns=Columns("tok_input", references=("output",)),
    n_samples=13368,
    max_input_len=2540,  # of the longest article; NVIDIA's engines for this benchmark have the same
    max_output_len=128,
    end_ids=(128001, 128008, 128009),  # as llama3.1-405b's
    accuracy=Accuracy(
        metric="rouge",
        references={"rouge1": 38.7792, "rouge2": 15.9075, "rougeL": 24.4957, "rougeLsum": 35.793},
        length="gen_len",
        bounds=(0.9 * 8_167_644, 1.1 * 8_167_644),
    ),
    submission=Submission(
        rounds={"v6.0": ("llama3.1-8b",), "v6.1": ("llama3.1-8b",)},
        limits=LatencyLimits(ttft_ms=2000, tpot_ms=100, target_ms=20_000),
        interactive=LatencyLimits(ttft_ms=500, tpot_ms=30, target_ms=20_000),
        scenarios=(("Offline",), ("Server", "Interactive")),
    ),
    tiny_model="tiny-llama",
    tiny_divisor=20,
    endpoints=Endpoints(
        "llama3_1-8b",
        "cnn_dailymail",
        "https://huggingface.co/meta-llama/Llama-3.1-8B-Instruct",
        "https://huggingface.co/datasets/abisee/cnn_dailymail",
    ),
)

LLAMA3_1_8B_EDGE = replace(
    LLAMA3_1_8B,
    name="llama3.1-8b-edge",
    aliases=("llama3_1-8b-edge", "llama-v3.1-8b-edge"),
    members=("LLAMA3_1_8B_EDGE",),
    loadgen_model="llama3_1-8b-edge",
    frame_file="sample_cnn_eval_5000.json",
    n_samples=5000,
    scenarios=("SingleStream", "Offline"),
    loadgen={"SingleStream": {"min_query_count": 1024}},  # the checker's; early stopping would accept less
    compliance=(),
    accuracy=Accuracy(
        metric="rouge",
        references={"rouge1": 39.06, "rouge2": 16.1147, "rougeL": 24.6375, "rougeLsum": 36.124},
        length="gen_len",
        bounds=(0.9 * 3_051_113, 1.1 * 3_051_113),
    ),
    submission=Submission(
        rounds={"v6.0": ("llama3.1-8b-edge",), "v6.1": ("llama3.1-8b-edge",)},
        limits=None,
        scenarios=(("SingleStream",), ("Offline",)),
        system_type="edge",
    ),
    endpoints=None,
)

DEEPSEEK_R1 = Workload(
    name="deepseek-r1",
    aliases=("deepseek-ai-r1",),
    members=("DEEPSEEK_R1", "DeepSeek_R1"),  # the second is NVIDIA's spelling
    loadgen_model="deepseek-r1",
    hf_model="deepseek-ai/DeepSeek-R1",
    architecture="DeepseekV3ForCausalLM",
    model_path="build/models/DeepSeek-R1",
    tensor_parallelism=8,  # its weights are FP8
    dataset_path="build/preprocessed_data/deepseek-r1",
    frame_file="mlperf_deepseek_r1_dataset_4388_fp8_eval.pkl",
    columns=Columns("tok_input", "tok_input_len", references=("dataset", "ground_truth", "question")),
    n_samples=4388,
    max_input_len=3140,  # the reference's 3,136, and 4 of the chat template
    max_output_len=20000,
    end_ids=(1,),
    accuracy=Accuracy(
        metric="by_reference",
        references={"exact_match": 81.3582},
        length="tokens_per_sample",
        bounds=(0.9 * 3886.2274, 1.1 * 3886.2274),
        evaluator="language/deepseek-r1/eval_accuracy.py",
        evaluator_options=("--input-file", "--dataset-file"),
    ),
    submission=Submission(
        rounds={"v6.0": ("deepseek-r1",), "v6.1": ("deepseek-r1",)},
        limits=LatencyLimits(ttft_ms=2000, tpot_ms=80, target_ms=60_000),
        interactive=LatencyLimits(ttft_ms=1500, tpot_ms=15, target_ms=60_000),
        scenarios=(("Offline",), ("Server", "Interactive")),
        draft_head="the head of deepseek-ai/DeepSeek-R1 (EAGLE-style, 3 steps, top-k 1)",
    ),
    tiny_model="tiny-llama",
    tiny_divisor=16,
    endpoints=Endpoints(
        "deepseek-r1",
        "mlperf_deepseek_r1",
        "https://huggingface.co/deepseek-ai/DeepSeek-R1",
        "https://github.com/mlcommons/inference/tree/master/language/deepseek-r1",
    ),
)

GPT_OSS_120B = Workload(
    name="gpt-oss-120b",
    aliases=("gptoss-120b",),
    members=("GPT_OSS_120B",),
    loadgen_model="gpt-oss-120b",
    hf_model="openai/gpt-oss-120b",
    architecture="GptOssForCausalLM",
    model_path="build/models/gpt-oss-120b",
    tensor_parallelism=1,  # its weights are MXFP4
    dataset_path="build/preprocessed_data/gpt-oss-120b",
    frame_file="perf_eval_ref.pkl",
    columns=Columns("input_tokens", references=("dataset", "ground_truth")),
    n_samples=6396,
    max_input_len=98304,  # what the model's context of 131,072 tokens leaves beside the longest answer
    max_output_len=10240,
    end_ids=(200002, 199999, 200012),  # <|return|>, <|endoftext|>, <|call|>
    sampling={"temperature": 1.0, "top_p": 1.0, "top_k": 0},
    loadgen={"Offline": {"min_query_count": 6396}},  # missing in mlperf.conf, but the checker requires it
    compliance=("TEST07", "TEST09"),
    accuracy_samples=4395,
    accuracy_output_len=32768,
    accuracy=Accuracy(
        metric="by_reference",
        references={"exact_match": 83.13},
        length="tokens_per_sample",
        bounds=(0.0, 1.1 * 9999),
        evaluator="language/gpt-oss-120b/eval_mlperf_accuracy.py",
        evaluator_options=("--mlperf-log", "--reference-data"),
    ),
    submission=Submission(
        rounds={"v6.0": ("gpt-oss-120b",), "v6.1": ("gpt-oss-120b",)},
        limits=LatencyLimits(ttft_ms=3000, tpot_ms=80, target_ms=60_000),
        interactive=LatencyLimits(ttft_ms=2000, tpot_ms=15, target_ms=60_000),
        scenarios=(("Offline",), ("Server", "Interactive")),
        draft_head="nvidia/gpt-oss-120b-Eagle3-long-context (EAGLE3-style, 3 steps, top-k 1)",
    ),
    tiny_model="tiny-llama",
    tiny_divisor=1024,
    endpoints=Endpoints(
        "gpt-oss-120b",
        "mlperf_gpt_oss_performance",
        "https://huggingface.co/openai/gpt-oss-120b",
        "https://github.com/mlcommons/inference/tree/master/language/gpt-oss-120b",
    ),
)

_PLAIN = (
    LLAMA2_70B,
    MIXTRAL_8X7B,
    LLAMA3_1_405B,
    LLAMA3_1_8B,
    LLAMA3_1_8B_EDGE,
    DEEPSEEK_R1,
    GPT_OSS_120B,
)
WORKLOADS = {
    form.name: form
    for plain in _PLAIN
    for form in ((plain, plain.interactive()) if plain.has_interactive_form else (plain,))
}
