"""Requests that an engine can never answer."""

from __future__ import annotations

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
    n_total = n + (1 if sequence.hands_off else sequence.max_output)
    if n_total > info.max_seq_len:
        return f"{n} prompt tokens and {n_total - n} output tokens exceed max_seq_len {info.max_seq_len}"
    if n > config.max_num_tokens and not config.enable_chunked_context:
        return f"{n} prompt tokens exceed max_num_tokens {config.max_num_tokens}, and chunked context is off"
    return None if sequence.extras is None else sequence.extras.refusal(sequence, info, config)
