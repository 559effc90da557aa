"""Tokenizers. Results are equal to `transformers`, whose import takes seconds.

The library `tokenizers` reads a Hugging Face folder's `tokenizer.json`. A prompt becomes one user message of
the folder's chat template, if it has one. Presets, and cores without a model, use bytes as tokens. For a
folder without a tokenizer, prompts must be token ids.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError, about
from mpillm.data.chat_template import ChatTemplate, Messages, Tools
from mpillm.files import LFS_POINTER, check_files, excerpt, lfs_hint, panics_named, read_object

# Formats that mpillm cannot read, each with the Python for the tokenizer in the folder `d`, and the packages
# that it needs.
_AUTO = "from transformers import AutoTokenizer as t; t.from_pretrained(d)"
_TEKKEN = 'from transformers.integrations.mistral import convert_tekken_tokenizer as t; t(d + "/tekken.json")'
_OTHER_FORMATS = {
    "tokenizer.model": (_AUTO, "transformers sentencepiece protobuf"),
    "vocab.json": (_AUTO, "transformers"),
    "tiktoken.model": (_AUTO, "transformers tiktoken"),
    "tekken.json": (_TEKKEN, "transformers"),
}
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

Tokens = Sequence[int] | NDArray[np.int32]

# A text that may have too many tokens is first tokenized in pieces of `_PIECE` characters, because the
# library needs about 400 bytes per token. A piece's end may split a token into at most `_MAX_SPLIT` tokens.
_PIECE, _MAX_SPLIT = 1 << 16, 256


class TooLongError(ConfigError):
    """A text has more tokens than allowed."""


class Tokenizer(Protocol):
    """Interface of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including special ones. A model's vocabulary may be larger, for padding."""

    @property
    def plain_tokens(self) -> range:
        """Longest range of ids without a special token, for synthetic prompts."""

    @property
    def writes_tool_calls(self) -> bool:
        """Whether the chat template asks for calls of tools between `<tool_call>` tags."""

    def encode(self, prompt: str) -> list[int]:
        """Return the model's input. With a chat template, `prompt` is the one message of a chat."""

    def encode_batch(self, prompts: Sequence[str]) -> list[list[int]]:
        """Encode many prompts as `encode` does, on all CPU cores."""

    def encode_chats(self, chats: Sequence[Messages], tools: Tools = None) -> list[list[int]]:
        """Return the model's input for each chat, in less time if they are requests of one conversation.

        `tools`: that the model may call in these chats. Raises as `render` and `encode_plain`.
        """

    def render(self, messages: Messages, tools: Tools = None) -> str:
        """Return the text of a chat, for `encode_plain`. Waits for the process that renders all chats.

        Raises ConfigError without a chat template, or if the template fails on these messages.
        """

    def encode_text(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Return the model's input for a plain text, with the special tokens that every input has.

        If a long text has far more than `max_tokens` tokens, this raises TooLongError before it needs much
        memory.
        """

    def encode_plain(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Return the tokens of the text alone, as for a rendered chat. Raises as `encode_text`."""

    def decode(self, tokens: Tokens, keep_special: bool = False) -> str:
        """Return the text of a response, without special tokens unless `keep_special`."""


@about("model_path")
def load_tokenizer(model_path: Path | None, apply_chat_template: bool = True) -> Tokenizer:
    """Return the tokenizer of the folder `model_path`; None: a ByteTokenizer. Raises ConfigError."""
    if model_path is None:
        return ByteTokenizer()
    if not model_path.is_dir():
        raise ConfigError(f"--model_path {model_path}: no such folder")
    check_files(model_path)
    file = model_path / "tokenizer.json"
    if not file.exists():
        if others := [name for name in _OTHER_FORMATS if (model_path / name).exists()]:
            tokenizer, packages = _OTHER_FORMATS[others[0]]
            raise ConfigError(
                f"{model_path} has {others[0]} but no tokenizer.json; write one (pip install {packages}):"
                f" `python3 -c 'import sys; d = sys.argv[1]; {tokenizer}.save_pretrained(d)'"
                f" {shlex.quote(str(model_path))}`"
            )
        return NoTokenizer(f"--model_path {model_path}: no tokenizer.json in it")
    settings = _read_settings(model_path)
    source = _read_template(model_path, settings) if apply_chat_template else None
    if source is None:
        return FileTokenizer(file)
    special = {key: settings[key] for key in _SPECIAL_TOKENS if settings.get(key) is not None}
    return FileTokenizer(file, ChatTemplate(source, special))


class ByteTokenizer:
    """Tokenizer for the bytes of UTF-8 text: 256 tokens, none of them special."""

    vocab_size = 256
    plain_tokens = range(256)
    writes_tool_calls = False

    def encode(self, prompt: str) -> list[int]:
        return list(prompt.encode())

    def encode_batch(self, prompts: Sequence[str]) -> list[list[int]]:
        return [list(prompt.encode()) for prompt in prompts]

    def encode_chats(self, chats: Sequence[Messages], tools: Tools = None) -> list[list[int]]:
        return [self.encode_text(self.render(messages, tools)) for messages in chats]

    def render(self, messages: Messages, tools: Tools = None) -> str:
        """Return the tools, and the messages' texts and tool calls, one in each line."""
        lines = list(map(json.dumps, tools or ()))
        for message in messages:
            if message.get("content"):
                lines.append(str(message["content"]))
            lines += map(json.dumps, message.get("tool_calls") or ())
        return "\n".join(lines)

    def encode_text(self, text: str, max_tokens: int | None = None) -> list[int]:
        if _may_be_too_long(text, max_tokens):
            raise TooLongError(f"more than {max_tokens} tokens")
        return list(text.encode())

    def encode_plain(self, text: str, max_tokens: int | None = None) -> list[int]:
        return self.encode_text(text, max_tokens)

    def decode(self, tokens: Tokens, keep_special: bool = False) -> str:
        """Decode bytes.

        Tokens outside 0 to 255 (a model's vocabulary may be larger) and invalid UTF-8 become U+FFFD.
        """
        ids = np.asarray(tokens, np.int64)
        ids = np.where((ids >= 0) & (ids < 256), ids, 0xFF)  # the byte 0xFF never occurs in UTF-8
        return ids.astype(np.uint8).tobytes().decode(errors="replace")


class NoTokenizer:
    """Placeholder for a missing tokenizer; every use of a text raises ConfigError."""

    vocab_size = 1 << 31  # unknown
    plain_tokens = range(256)  # every model has these tokens
    writes_tool_calls = False

    def __init__(self, why: str) -> None:
        self.why = why

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"{self.why}; a text has no tokens without it: copy it from the model, or give token ids"
            ' ("input_tokens", or --dataset synthetic)',
            about=["model_path"],
        )

    encode = encode_batch = encode_chats = encode_text = encode_plain = refuse
    render = decode = refuse


class FileTokenizer:
    """Tokenizer of a `tokenizer.json`, with an optional chat template (`render`)."""

    def __init__(self, file: Path, template: ChatTemplate | None = None) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise ConfigError(
                f"{file} needs the tokenizers library: pip install 'mpillm[tokenizer]'"
            ) from error
        library = f"tokenizers {tokenizers.__version__}"
        os.putenv("RUST_BACKTRACE", "0")  # a panic in this process then prints one line
        with panics_named(f"{file} is not a tokenizer that {library} can read"):
            content = file.read_bytes()
            if content.startswith(LFS_POINTER):
                raise ValueError(lfs_hint(file.parent))
            _check_merges(content)
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
            _check_growth(self._tokenizer)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = template
        self.writes_tool_calls = template is not None and template.writes_tool_calls
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        special = {
            i: token.content
            for i, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        self._special = re.compile("|".join(map(re.escape, special.values())) or r"\Z(?!\Z)")
        edges = [-1, *sorted(special), self.vocab_size]
        self.plain_tokens = max((range(a + 1, b) for a, b in itertools.pairwise(edges)), key=len)

    def encode(self, prompt: str) -> list[int]:
        return self.encode_batch([prompt])[0]

    def encode_batch(self, prompts: Sequence[str]) -> list[list[int]]:
        texts = list(prompts)
        if self._template is not None:
            texts = self._template.render([[{"role": "user", "content": prompt}] for prompt in prompts])
        # A chat template writes the special tokens; without one, the post-processor adds them.
        with panics_named(_FAILS):
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=self._template is None)
        return [encoding.ids for encoding in encodings]

    def encode_chats(self, chats: Sequence[Messages], tools: Tools = None) -> list[list[int]]:
        texts = self._rendered(chats, tools)
        if len(texts) < 2:
            return [self.encode_plain(text) for text in texts]
        # A special token ends what the library encodes together. So a message that many chats contain is
        # encoded once. The longest text shows whether this tokenizer encodes the rest of a text like a text.
        pieces: dict[str, list[int]] = {}
        encoded = [self._encode_pieces(text, pieces) for text in texts]
        longest = max(range(len(texts)), key=lambda i: len(texts[i]))
        if encoded[longest] != self.encode_plain(texts[longest]):
            return [self.encode_plain(text) for text in texts]
        return encoded

    def _encode_pieces(self, text: str, pieces: dict[str, list[int]]) -> list[int]:
        tokens, start = list[int](), 0
        for end in [*(match.end() for match in self._special.finditer(text)), len(text)]:
            piece = text[start:end]
            if piece and piece not in pieces:
                pieces[piece] = self.encode_plain(piece)
            tokens += pieces[piece] if piece else ()
            start = end
        return tokens

    def render(self, messages: Messages, tools: Tools = None) -> str:
        return self._rendered([messages], tools)[0]

    def _rendered(self, chats: Sequence[Messages], tools: Tools = None) -> list[str]:
        if self._template is None:
            raise ConfigError("the model has no chat template, or --apply_chat_template is false")
        return self._template.render(chats, tools)

    def encode_text(self, text: str, max_tokens: int | None = None) -> list[int]:
        self._check_length(text, max_tokens)
        return self._encode(text, add_special_tokens=True)

    def encode_plain(self, text: str, max_tokens: int | None = None) -> list[int]:
        self._check_length(text, max_tokens)
        return self._encode(text, add_special_tokens=False)

    def _check_length(self, text: str, max_tokens: int | None) -> None:
        if not _may_be_too_long(text, max_tokens):
            return
        n = 0
        for at in range(0, len(text), _PIECE):
            n += len(self._encode(text[at : at + _PIECE], add_special_tokens=False)) - _MAX_SPLIT
            if n > (max_tokens or 0):
                raise TooLongError(f"more than {max_tokens} tokens")

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        with panics_named(_FAILS):
            if len(text) < _LONG:
                encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            else:  # `encode_batch` releases the interpreter lock
                (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
            ids: list[int] = encoding.ids
        return ids

    def decode(self, tokens: Tokens, keep_special: bool = False) -> str:
        with panics_named("the model's tokenizer fails on these tokens"):
            return self._tokenizer.decode(
                [int(token) for token in tokens], skip_special_tokens=not keep_special
            )


def _may_be_too_long(text: str, max_tokens: int | None) -> bool:
    return max_tokens is not None and len(text) > max(_PIECE, 2 * max_tokens)


_LONG = 4096  # characters, tokenized in about 2 ms
_FAILS = "the model's tokenizer fails on this text"  # for example, a regular expression backtracks too far
_MAX_GROWTH = 1024
_INNER = ("normalizers", "decoders", "processors")


def _check_growth(tokenizer: Any) -> None:
    """Raise ValueError if a part of a tokenizer can make a text more than 1,024 times as long."""
    for part in (tokenizer.normalizer, tokenizer.decoder, tokenizer.post_processor):
        if part is not None and (growth := _growth(json.loads(part.__getstate__()))) > _MAX_GROWTH:
            raise ValueError(f"its {type(part).__name__} makes a text {growth:g} times as long")


def _growth(part: Mapping[str, Any]) -> float:
    growth = math.prod(_growth(one) for name in _INNER for one in part.get(name) or ())
    if part["type"] == "Replace":
        text = part["pattern"].get("String")  # a regular expression may match before each character
        growth *= max(1.0, len(part["content"]) / len(text)) if text else 1.0 + len(part["content"])
    elif part["type"] == "Prepend":
        growth *= max(1, len(part["prepend"]))
    elif part["type"] == "TemplateProcessing":
        tokens = part["special_tokens"]
        names = [piece.get("SpecialToken", {}).get("id") for piece in part["single"]]
        growth *= max(1, sum(len(tokens[name]["ids"]) if name in tokens else 1 for name in names))
    return float(growth)


_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')


def _check_merges(content: bytes) -> None:
    """Raise ValueError for merges without the prefix of their model.

    The library removes the prefix without a check, and may end the process.
    """
    if not _PREFIX.search(content):
        return
    model = json.loads(content)["model"]
    prefix = model["continuing_subword_prefix"]
    for merge in model.get("merges", ()):
        right = merge.partition(" ")[2] if isinstance(merge, str) else merge[1]
        if not right.startswith(prefix):
            raise ValueError(f"merge {excerpt(merge)} without the prefix {excerpt(prefix)}")


def special_tokens(model_path: Path) -> dict[str, str]:
    """Return the texts of a folder's special tokens by name, such as ``eos_token``.

    Raises ConfigError if the folder cannot be read.
    """
    settings = _read_settings(model_path)
    return {name: str(settings[name]) for name in _SPECIAL_TOKENS if settings.get(name) is not None}


def _read_settings(model_path: Path) -> dict[str, Any]:
    """Read `tokenizer_config.json`, which overrides the older `special_tokens_map.json`."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = model_path / name
        if file.exists():
            settings |= {key: value for key, value in read_object(file).items() if value is not None}
    for key in _SPECIAL_TOKENS:
        if isinstance(token := settings.get(key), dict):
            settings[key] = token.get("content")
    return settings


def _read_template(model_path: Path, settings: dict[str, Any]) -> str | None:
    """Return the template in `chat_template.jinja`, or else the default in `tokenizer_config.json`."""
    file = model_path / "chat_template.jinja"
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        template = settings.get("chat_template")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if isinstance(template, list):
        named = (one for one in template if isinstance(one, dict) and one.get("name") == "default")
        template = next(named, {}).get("template")
    if template is not None and not isinstance(template, str):
        where = model_path / "tokenizer_config.json"
        raise ConfigError(f"{where}: chat_template is {type(template).__name__}, not text")
    return template
