"""Requests that an engine can never answer."""

from __future__ import annotations

from mpillm.engine.extras.beams import Beams
from mpillm.engine.schedule.sequence import Sequence
from mpillm.engine.shape.engine_config import SchedulerConfig
from mpillm.engine.shape.model_info import ModelInfo


def refusal(sequence: Sequence, info: ModelInfo, config: SchedulerConfig) -> str | None:
    """Return why an engine can never answer `sequence`, or None."""
    n = len(sequence.prompt)
    if n == 0 or sequence.max_output == 0:
        return (
            f"{n} prompt tokens and at most {sequence.max_output} output tokens:"
            " at least one of each is needed"
        )
    if not 0 <= min(sequence.prompt) <= max(sequence.prompt) < info.vocab_size:
        return f"a prompt token is not in the vocabulary (0 to {info.vocab_size - 1})"
    n_total = n + (1 if sequence.hand_over else sequence.max_output)
    if n_total > info.max_seq_len:
        return f"{n} prompt tokens and {n_total - n} output tokens exceed max_seq_len {info.max_seq_len}"
    if n > config.max_num_tokens and not config.enable_chunked_context:
        return f"{n} prompt tokens exceed max_num_tokens {config.max_num_tokens}, and chunked context is off"
    if sequence.width > 1 and (why := _beam_refusal(sequence, info, config)):
        return why
    return sequence.special.refusal(info.vocab_size) if sequence.special is not None else None


def _beam_refusal(sequence: Sequence, info: ModelInfo, config: SchedulerConfig) -> str | None:
    width, size = sequence.width, config.tokens_per_block
    if info.window_cache_tokens:
        return f"beam_width {width}: not on a GPU where layers with a window have a KV cache of their own"
    ends = sequence.special.ends if sequence.special is not None else None
    n = Beams.blocks_for(len(sequence.prompt), sequence.n_cached_at_most, width, size)
    there = info.kv_cache_tokens // size
    if n > there:
        return f"beam_width {width} needs {n * size} tokens of KV cache, of which there are {there * size}"
    if width > min(config.max_batch_size, config.max_num_tokens):
        return (
            f"beam_width {width} exceeds max_batch_size {config.max_batch_size}"
            f" or max_num_tokens {config.max_num_tokens}"
        )
    n_ends = len(set(info.end_ids if ends is None else ends))
    if Beams.candidates(width, n_ends) > info.vocab_size:
        return f"beam_width {width} is too large for a vocabulary of {info.vocab_size}"
    return None
