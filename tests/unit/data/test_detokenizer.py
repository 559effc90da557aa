"""Text as it comes is the text of the whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpillm.data.detokenizer import Detokenizer, StopStrings
from mpillm.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, Tokens

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=30)


def file_tokenizer(folder: Path, kind: str) -> FileTokenizer:
    """Return a byte-level tokenizer like GPT-2's, or one like SentencePiece's whose unknown characters are
    tokens of a byte each."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    if kind == "bytes":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        made = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    else:
        words = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdefgh"]
        made = tokenizers.Tokenizer(
            models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
        )
        steps = [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
        made.decoder = decoders.Sequence(steps)
    made.add_special_tokens(["<end>"])
    file = folder / f"{kind}.json"
    made.save(str(file))
    assert json.loads(file.read_text())
    return FileTokenizer(file)


@pytest.fixture(scope="module", params=["none", "bytes", "fallback"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return (
        ByteTokenizer()
        if request.param == "none"
        else file_tokenizer(tmp_path_factory.mktemp("tokenizer"), request.param)
    )


@given(text=TEXT, data=st.data())
def test_pieces_are_whole_characters_and_make_the_text(
    tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    tokens = tokenizer.encode_plain(text)
    detokenizer, pieces, at = Detokenizer(tokenizer), list[str](), 0
    while at < len(tokens):
        n = data.draw(st.integers(1, 5))
        pieces.append(detokenizer.add(tokens[at : at + n]))
        at += n
    assert "\ufffd" not in "".join(pieces)
    assert "".join([*pieces, detokenizer.end()]) == tokenizer.decode(tokens)


class Counted(FileTokenizer):
    """Counts the tokens that it decodes."""

    n_decoded = 0

    def decode(self, tokens: Tokens, keep_special: bool = False) -> str:
        self.n_decoded += len(tokens)
        return super().decode(tokens, keep_special)


@pytest.mark.parametrize("text", ["", "a b"])
@pytest.mark.parametrize("kind", ["bytes", "fallback"])
def test_many_tokens_without_text(tmp_path: Path, kind: str, text: str) -> None:
    """Such as end tokens that do not end the answer: the work per token does not grow."""
    file_tokenizer(tmp_path, kind)
    tokenizer = Counted(tmp_path / f"{kind}.json")
    end, n = tokenizer.encode_text("<end>")[-1], 200
    detokenizer = Detokenizer(tokenizer)
    tokens = [*tokenizer.encode_plain(text), *[end] * n, *tokenizer.encode_plain(" b")]
    pieces = [detokenizer.add([token]) for token in tokens]
    assert tokenizer.n_decoded < 20 * n
    assert "".join(pieces) == tokenizer.decode(tokens)


@pytest.mark.parametrize("kind", ["bytes", "fallback"])
@given(text=TEXT, data=st.data())
def test_tokens_without_text_between_others(
    kind: str, tmp_path_factory: pytest.TempPathFactory, text: str, data: st.DataObject
) -> None:
    tokenizer = file_tokenizer(tmp_path_factory.mktemp("tokenizer"), kind)
    end, tokens = tokenizer.encode_text("<end>")[-1], tokenizer.encode_plain(text)
    for _ in range(data.draw(st.integers(1, 4))):
        tokens.insert(data.draw(st.integers(0, len(tokens))), end)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add([token]) for token in tokens]
    assert "".join([*pieces, detokenizer.end()]) == tokenizer.decode(tokens)


@given(tokens=st.lists(st.integers(0, 255), max_size=40))
def test_bytes_that_are_no_text(tokenizer: Tokenizer, tokens: list[int]) -> None:
    """No byte is held back for ever, and text that was given once stays."""
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.add([token]) for token in tokens)
    assert len(text) >= len(tokenizer.decode(tokens[:-9])) - 9
    text += detokenizer.end()
    if isinstance(tokenizer, ByteTokenizer):
        assert text == tokenizer.decode(tokens)


def test_a_character_comes_with_its_last_byte() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    assert [detokenizer.add([byte]) for byte in "aé€😀".encode()] == [
        "a",
        "",
        "é",
        "",
        "",
        "€",
        "",
        "",
        "",
        "😀",
    ]
    detokenizer.add([0xF0, 0x9F])
    assert detokenizer.end() == "\ufffd"


@given(
    text=st.text("ab\n", max_size=30),
    strings=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    data=st.data(),
)
def test_stop_strings(text: str, strings: list[str], data: st.DataObject) -> None:
    stop, pieces, at = StopStrings(strings), list[str](), 0
    while at < len(text) and stop.match is None:
        n = data.draw(st.integers(1, 4))
        pieces.append(stop.add(text[at : at + n]))
        at += n
    seen = text[:at]
    ends = [seen.find(string) for string in strings if string in seen]
    assert (stop.match is not None) == bool(ends)
    assert "".join(pieces) + stop.end() == (seen[: min(ends)] if ends else seen)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    stop = StopStrings(["###", "END"])
    assert [stop.add(piece) for piece in ("ab#", "#c", "E", "N", "D!", "more")] == [
        "ab",
        "##c",
        "",
        "",
        "",
        "",
    ]
    assert stop.match == "END" and stop.end() == ""
