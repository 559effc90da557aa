"""The salts of performance runs: where they are, and what a KV cache can still share."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm.data.tokenizer import NoTokenizer, load_tokenizer
from mpillm.submission.salts import Salts, next_salt_seed, shared_beginning
from tests.helpers.make_checkpoint import make_tokenizer

NONE = NoTokenizer("without --model_path")


def prompts(*lists: list[int]) -> list[np.ndarray]:
    return [np.array(one, np.int32) for one in lists]


@pytest.mark.parametrize(
    ("lists", "shared"),
    [
        ([[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 3, 9]], 2),
        ([[1, 2], [3, 4]], 0),
        ([[1, 2, 3], [1, 2, 3, 4]], 2),  # the shorter one keeps a token behind its salt
        ([[1, 2, 3], [1, 2, 3]], 2),
        ([[1], [1]], 0),
        ([[1, 2, 3]], 0),
    ],
)
def test_the_system_prompt_is_what_all_prompts_begin_with(lists: list[list[int]], shared: int) -> None:
    assert shared_beginning(prompts(*lists)) == shared


def test_only_the_system_prompt_stays_shared() -> None:
    data = prompts([1, 2, 3, 40, 41, 42, 9], [1, 2, 3, 50, 51, 9], [1, 2, 3, 60, 61, 62, 9], [1, 2, 3, 70, 9])
    salts = Salts(data, NONE, "7")
    salted = [salts.add(data[0]) for _ in range(1000)]
    assert all(one.dtype == np.int32 for one in salted)
    tails = {tuple(one[-4:]) for one in salted}
    assert tails == {(40, 41, 42, 9)} and {tuple(one[:3]) for one in salted} == {(1, 2, 3)}
    middles = {tuple(one[3:-4]) for one in salted}
    assert len(middles) == 1000, "each request has another salt"
    # 9 and the beginning are in all prompts, like the special tokens of a chat template.
    assert not {token for middle in middles for token in middle} & {1, 2, 3, 9}
    again = Salts(data, NONE, "7")
    assert all(np.array_equal(one, again.add(data[0])) for one in salted), "the same for a seed"
    assert not np.array_equal(salted[0], Salts(data, NONE, "8").add(data[0]))


def test_a_salt_has_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of 64 bits is another salt: with few tokens, it takes more of them."""
    for n_tokens in (2, 3, 100):
        data = prompts(*([token] for token in range(n_tokens)))
        salts = Salts(data, NONE, "7")
        made = set()
        for number in (0, 1, 2**63, 2**64 - 1, 2**64 - 2):
            monkeypatch.setattr(salts._random, "getrandbits", lambda _, number=number: number)
            made.add(tuple(salts.add(data[0])))
        assert len(made) == 5
        assert n_tokens ** (len(next(iter(made))) - 1) >= 2**64


def test_with_a_tokenizer_it_is_a_number_in_brackets(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path, apply_chat_template=False)
    data = [np.array(tokenizer.encode_plain(text), np.int32) for text in ("do: cats", "do: dogs")]
    salts = Salts(data, tokenizer, "7")
    texts = [tokenizer.decode(salts.add(data[1])) for _ in range(3)]
    assert len({*texts}) == 3
    for text in texts:
        assert re.fullmatch(r"do: \[[0-9a-f]{16}\] dogs", text), text
    assert salts.description() == {"bits": 64, "after_tokens": salts.after, "seed": "7"}


def test_each_test_has_another_seed(tmp_path: Path) -> None:
    file = tmp_path / "salts.json"
    seeds = [next_salt_seed(file, 9, c) for c in (48, 48, 4, 48)]
    assert seeds == ["9/r48/1", "9/r48/2", "9/r4/1", "9/r48/3"]
    file.write_text('{"9/r48": "x"}')
    with pytest.raises(ConfigError, match=r"salts\.json: damaged"):
        next_salt_seed(file, 9, 48)
