"""Inputs and outputs of the models of a Triton repository, as in TensorRT-LLM's templates.

A line is a tensor: name, type, shape and properties. `scalar`: the model sees the shape [1] as a number.
`optional`. `ragged`: requests of a batch may have different shapes.

Source: NVIDIA/TensorRT-LLM, triton_backend/all_models/inflight_batcher_llm, the last release with that
backend (1.3.0rc20). The tensors of images and videos in `preprocessing` and `tensorrt_llm_bls` are omitted.
"""

from __future__ import annotations

from typing import Any

from mpillm.triton.pbtxt import EnumName


def tensors(table: str) -> list[dict[str, Any]]:
    """Return the tensor messages of a table."""
    return [_tensor(*line.split()) for line in table.split("\n") if line]


def _tensor(name: str, kind: str, dims: str, *properties: str) -> dict[str, Any]:
    tensor: dict[str, Any] = {
        "name": name,
        "data_type": EnumName(f"TYPE_{kind}"),
        "dims": [int(dim) for dim in dims.split(",")],
    }
    if "scalar" in properties:
        tensor["reshape"] = {"shape": []}
    if "optional" in properties:
        tensor["optional"] = True
    if "ragged" in properties:
        tensor["allow_ragged_batch"] = True
    return tensor


TENSORRT_LLM_INPUTS = """
input_ids INT32 -1 optional ragged
encoder_input_features FP16 -1,-1 optional ragged
encoder_output_lengths INT32 1 scalar optional
input_lengths INT32 1 scalar
request_output_len INT32 1 scalar
num_return_sequences INT32 1 scalar optional
draft_input_ids INT32 -1 optional ragged
decoder_input_ids INT32 -1 optional ragged
decoder_input_lengths INT32 1 scalar optional
draft_logits FP32 -1,-1 optional ragged
draft_acceptance_threshold FP32 1 scalar optional
end_id INT32 1 scalar optional
pad_id INT32 1 scalar optional
stop_words_list INT32 2,-1 optional ragged
bad_words_list INT32 2,-1 optional ragged
embedding_bias FP32 -1 optional ragged
beam_width INT32 1 scalar optional
temperature FP32 1 scalar optional
runtime_top_k INT32 1 scalar optional
runtime_top_p FP32 1 scalar optional
runtime_top_p_min FP32 1 scalar optional
runtime_top_p_decay FP32 1 scalar optional
runtime_top_p_reset_ids INT32 1 scalar optional
len_penalty FP32 1 scalar optional
early_stopping BOOL 1 scalar optional
repetition_penalty FP32 1 scalar optional
min_tokens INT32 1 scalar optional
beam_search_diversity_rate FP32 1 scalar optional
presence_penalty FP32 1 scalar optional
frequency_penalty FP32 1 scalar optional
seed UINT64 1 scalar optional
return_log_probs BOOL 1 scalar optional
return_context_logits BOOL 1 scalar optional
return_generation_logits BOOL 1 scalar optional
return_perf_metrics BOOL 1 scalar optional
return_num_input_tokens BOOL 1 scalar optional
return_num_output_tokens BOOL 1 scalar optional
exclude_input_in_output BOOL 1 scalar optional
stop BOOL 1 scalar optional
streaming BOOL 1 scalar optional
prompt_embedding_table FP16 -1,-1 optional ragged
prompt_table_extra_ids UINT64 -1 optional ragged
prompt_vocab_size INT32 1 scalar optional
cross_attention_mask BOOL -1,-1 optional ragged
mrope_rotary_cos_sin FP32 -1 optional
mrope_position_deltas INT64 1 optional
lora_task_id UINT64 1 scalar optional
lora_weights FP16 -1,-1 optional ragged
lora_config INT32 -1,3 optional ragged
context_phase_params UINT8 -1 optional ragged
skip_cross_attn_blocks BOOL 1 optional ragged
retention_token_range_starts INT32 -1 optional ragged
retention_token_range_ends INT32 -1 optional ragged
retention_token_range_priorities INT32 -1 optional ragged
retention_token_range_durations_ms INT32 -1 optional ragged
retention_decode_priority INT32 1 optional ragged
retention_decode_duration_ms INT32 1 optional ragged
guided_decoding_guide_type STRING 1 optional ragged
guided_decoding_guide STRING 1 optional ragged
lookahead_window_size INT32 1 optional ragged
lookahead_ngram_size INT32 1 optional ragged
lookahead_verification_set_size INT32 1 optional ragged
"""

# Outputs of the engine's model, the ensemble and BLS.
_SCORES = """
cum_log_probs FP32 -1
output_log_probs FP32 -1,-1
context_logits FP32 -1,-1
generation_logits FP32 -1,-1,-1
batch_index INT32 1
sequence_index INT32 1
"""
PERF_METRICS = """
kv_cache_alloc_new_blocks INT32 1
kv_cache_reused_blocks INT32 1
kv_cache_alloc_total_blocks INT32 1
arrival_time_ns INT64 1
first_scheduled_time_ns INT64 1
first_token_time_ns INT64 1
last_token_time_ns INT64 1
acceptance_rate FP32 1
total_accepted_draft_tokens INT32 1
total_draft_tokens INT32 1
"""
_COUNTS = """
num_input_tokens INT32 1
num_output_tokens INT32 1
"""
TENSORRT_LLM_OUTPUTS = f"""
output_ids INT32 -1,-1
sequence_length INT32 -1
{_SCORES}
context_phase_params UINT8 -1
{PERF_METRICS}
{_COUNTS}"""

PREPROCESSING_INPUTS = """
QUERY STRING 1
DECODER_QUERY STRING 1 optional
REQUEST_OUTPUT_LEN INT32 1
BAD_WORDS_DICT STRING -1 optional
STOP_WORDS_DICT STRING -1 optional
EMBEDDING_BIAS_WORDS STRING -1 optional
EMBEDDING_BIAS_WEIGHTS FP32 -1 optional
END_ID INT32 1 optional
PAD_ID INT32 1 optional
PROMPT_TABLE_EXTRA_ID UINT64 1 optional
"""

PREPROCESSING_OUTPUTS = """
INPUT_ID INT32 -1
REQUEST_INPUT_LEN INT32 1
DECODER_INPUT_ID INT32 -1
REQUEST_DECODER_INPUT_LEN INT32 1
BAD_WORDS_IDS INT32 2,-1
STOP_WORDS_IDS INT32 2,-1
EMBEDDING_BIAS FP32 -1
REQUEST_OUTPUT_LEN INT32 -1
OUT_END_ID INT32 1
OUT_PAD_ID INT32 1
OUT_PROMPT_TABLE_EXTRA_IDS UINT64 -1
"""

POSTPROCESSING_INPUTS = """
TOKENS_BATCH INT32 -1,-1
SEQUENCE_LENGTH INT32 -1
"""

POSTPROCESSING_OUTPUTS = """
OUTPUT STRING -1
"""

ENSEMBLE_INPUTS = """
text_input STRING 1
decoder_text_input STRING 1 optional
max_tokens INT32 1
num_return_sequences INT32 1 optional
bad_words STRING -1 optional
stop_words STRING -1 optional
exclude_input_in_output BOOL 1 optional
end_id INT32 1 optional
pad_id INT32 1 optional
top_k INT32 1 optional
top_p FP32 1 optional
temperature FP32 1 optional
length_penalty FP32 1 optional
repetition_penalty FP32 1 optional
min_tokens INT32 1 optional
presence_penalty FP32 1 optional
frequency_penalty FP32 1 optional
seed UINT64 1 optional
return_log_probs BOOL 1 optional
return_context_logits BOOL 1 optional
return_generation_logits BOOL 1 optional
return_perf_metrics BOOL 1 optional
return_num_input_tokens BOOL 1 optional
return_num_output_tokens BOOL 1 optional
beam_width INT32 1 optional
stream BOOL 1 optional
prompt_embedding_table FP16 -1,-1 optional
prompt_table_extra_id UINT64 1 optional
prompt_vocab_size INT32 1 optional
embedding_bias_words STRING -1 optional
embedding_bias_weights FP32 -1 optional
lora_task_id UINT64 1 optional
lora_weights FP16 -1,-1 optional ragged
lora_config INT32 -1,3 optional ragged
guided_decoding_guide_type STRING 1 optional ragged
guided_decoding_guide STRING 1 optional ragged
"""

BLS_INPUTS = """
text_input STRING 1
decoder_text_input STRING 1 optional
max_tokens INT32 1
bad_words STRING -1 optional
stop_words STRING -1 optional
exclude_input_in_output BOOL 1 optional
end_id INT32 1 optional
pad_id INT32 1 optional
top_k INT32 1 optional
top_p FP32 1 optional
temperature FP32 1 optional
length_penalty FP32 1 optional
repetition_penalty FP32 1 optional
min_tokens INT32 1 optional
presence_penalty FP32 1 optional
frequency_penalty FP32 1 optional
seed UINT64 1 optional
return_log_probs BOOL 1 scalar optional
return_context_logits BOOL 1 scalar optional
return_generation_logits BOOL 1 scalar optional
num_return_sequences INT32 1 scalar optional
beam_width INT32 1 optional
stream BOOL 1 optional
prompt_embedding_table FP16 -1,-1 optional
prompt_vocab_size INT32 1 optional
prompt_table_extra_id UINT64 1 optional
embedding_bias_words STRING -1 optional
embedding_bias_weights FP32 -1 optional
num_draft_tokens INT32 1 optional
use_draft_logits BOOL 1 scalar optional
lora_task_id UINT64 1 scalar optional
lora_weights FP16 -1,-1 optional ragged
lora_config INT32 -1,3 optional ragged
return_perf_metrics BOOL 1 scalar optional
return_num_input_tokens BOOL 1 scalar optional
return_num_output_tokens BOOL 1 scalar optional
guided_decoding_guide_type STRING 1 optional
guided_decoding_guide STRING 1 optional
"""

# Outputs of both the ensemble and BLS.
TEXT_OUTPUTS = f"""
text_output STRING -1
{_SCORES}{PERF_METRICS}{_COUNTS}"""
