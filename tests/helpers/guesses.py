"""What tests of guesses share."""

from __future__ import annotations

N_OUTPUT = 48
NGRAM = {"decoding_type": "NGram", "max_draft_len": 4, "max_matching_ngram_size": 2}
