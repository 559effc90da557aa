"""Configurations of the models around `tensorrt_llm` in a Triton repository, for clients that send text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpillm.nvidia.configs import ENGINE_MODEL
from mpillm.triton import tensors as triton_tensors
from mpillm.triton.pbtxt import EnumName
from mpillm.triton.tensors import tensors

# Inputs of `preprocessing`, and their names in the models that take text.
TO_PREPROCESSING = {
    "QUERY": "text_input",
    "DECODER_QUERY": "decoder_text_input",
    "REQUEST_OUTPUT_LEN": "max_tokens",
    "BAD_WORDS_DICT": "bad_words",
    "STOP_WORDS_DICT": "stop_words",
    "EMBEDDING_BIAS_WORDS": "embedding_bias_words",
    "EMBEDDING_BIAS_WEIGHTS": "embedding_bias_weights",
    "END_ID": "end_id",
    "PAD_ID": "pad_id",
    "PROMPT_TABLE_EXTRA_ID": "prompt_table_extra_id",
}
# Outputs of `preprocessing`, and their names in the engine's model.
FROM_PREPROCESSING = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "DECODER_INPUT_ID": "decoder_input_ids",
    "REQUEST_DECODER_INPUT_LEN": "decoder_input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "STOP_WORDS_IDS": "stop_words_list",
    "BAD_WORDS_IDS": "bad_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
}
# Inputs of the models that take text, with another name in the engine's model.
TO_ENGINE = {
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "stream": "streaming",
}


def text_models(
    batch: int, decoupled: bool, tokenizer_dir: str, counts: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """Return the `config.pbtxt` of each model, by model name. `counts`: instances by model name."""

    def model(name: str, inputs: str, outputs: str, **more: Any) -> dict[str, Any]:
        return {
            "name": name,
            "backend": "python",
            "max_batch_size": batch,
            **more,
            "input": tensors(inputs),
            "output": tensors(outputs),
            "instance_group": [{"count": counts[name], "kind": EnumName("KIND_CPU")}],
        }

    t = triton_tensors
    queue = {"default_queue_policy": {"max_queue_size": 0}}  # no limit
    tokenizer = {"tokenizer_dir": tokenizer_dir}
    return {
        "preprocessing": model(
            "preprocessing",
            t.PREPROCESSING_INPUTS,
            t.PREPROCESSING_OUTPUTS,
            dynamic_batching=queue,
            parameters=texts({**tokenizer, "add_special_tokens": "true"}),
        ),
        "postprocessing": model(
            "postprocessing",
            t.POSTPROCESSING_INPUTS,
            t.POSTPROCESSING_OUTPUTS,
            dynamic_batching=queue,
            parameters=texts({**tokenizer, "skip_special_tokens": "true"}),
        ),
        "ensemble": _ensemble(batch),
        "tensorrt_llm_bls": model(
            "tensorrt_llm_bls",
            t.BLS_INPUTS,
            t.TEXT_OUTPUTS,
            model_transaction_policy={"decoupled": decoupled},
            parameters=texts(
                {
                    "accumulate_tokens": "false",
                    "tensorrt_llm_model_name": ENGINE_MODEL,
                    "tensorrt_llm_draft_model_name": "",
                    "multimodal_encoders_name": "",
                }
            ),
        ),
    }


def texts(parameters: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the parameters of a model."""
    return [{"key": key, "value": {"string_value": value}} for key, value in parameters.items()]


def _ensemble(batch: int) -> dict[str, Any]:
    inputs = tensors(triton_tensors.ENSEMBLE_INPUTS)
    outputs = tensors(triton_tensors.TEXT_OUTPUTS)
    first = set(TO_PREPROCESSING.values())
    passed = {
        TO_ENGINE.get(tensor["name"], tensor["name"]): tensor["name"]
        for tensor in inputs
        if tensor["name"] not in first
    }
    between = {name: f"_{name}" for name in FROM_PREPROCESSING.values()}
    engine_outputs = {tensor["name"]: tensor["name"] for tensor in outputs if tensor["name"] != "text_output"}
    tokens = {"output_ids": "_TOKENS_BATCH", "sequence_length": "_SEQUENCE_LENGTH"}
    steps = (
        (
            "preprocessing",
            TO_PREPROCESSING,
            {output: f"_{name}" for output, name in FROM_PREPROCESSING.items()},
        ),
        (ENGINE_MODEL, between | passed, tokens | engine_outputs),
        (
            "postprocessing",
            {"TOKENS_BATCH": "_TOKENS_BATCH", "SEQUENCE_LENGTH": "_SEQUENCE_LENGTH"},
            {"OUTPUT": "text_output"},
        ),
    )
    return {
        "name": "ensemble",
        "platform": "ensemble",
        "max_batch_size": batch,
        "input": inputs,
        "output": outputs,
        "ensemble_scheduling": {
            "step": [
                {
                    "model_name": name,
                    "model_version": -1,
                    "input_map": [{"key": key, "value": value} for key, value in ins.items()],
                    "output_map": [{"key": key, "value": value} for key, value in outs.items()],
                }
                for name, ins, outs in steps
            ]
        },
    }
