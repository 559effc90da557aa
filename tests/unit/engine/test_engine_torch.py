"""Names that tests/gpu imports from here until it imports them from tests/helpers."""

from tests.helpers.oracle import Tokens, expected_tokens
from tests.helpers.torch_cores import N_OUTPUT, Answers, make_batch, make_core

oracle = expected_tokens
__all__ = ["N_OUTPUT", "Answers", "Tokens", "make_batch", "make_core", "oracle"]
