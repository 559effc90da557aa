"""Conversion of a GGUF file's tokenizer to `tokenizer.json`: byte-level BPE, or SentencePiece by scores."""

from __future__ import annotations

from typing import Any

from disagg.errors import ConfigError
from mpillm.data.gguf_config import Metadata
from mpillm.files import panics_named

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # GGUF's types of tokens
_SPACE = "\u2581"  # SentencePiece's character for a space
_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {  # regular expressions that split a text into words, by GGUF's names
    "llama-bpe": _SPLIT_PATTERN.format(digits="{1,3}"),
    "qwen2": _SPLIT_PATTERN.format(digits=""),
    "gpt-4o": _CASES,
}
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}
_PLAIN = ("gpt-2", "smollm", "default")


def tokenizer_of(metadata: Metadata) -> Any:
    """Build the tokenizer. Raises ConfigError for an unknown kind, KeyError for a missing value."""
    values, source = metadata.values, metadata.source
    kind, splitter = values.get("tokenizer.ggml.model"), _splitter(metadata)
    if kind == "gpt2" and splitter in (*_PLAIN[:2], *_PATTERNS):
        tokenizer = _byte_level(metadata, str(splitter))
    elif kind == "llama" and splitter == "default":
        tokenizer = _sentence_piece(metadata)
    else:
        raise ConfigError(
            f"{source} has a tokenizer that cannot be converted: {kind!r}, {splitter!r}; known: 'gpt2' with"
            f" {', '.join((*_PLAIN[:2], *_PATTERNS))}, and 'llama'"
        )
    _add_special(tokenizer, metadata)
    return tokenizer


def _splitter(metadata: Metadata) -> Any:
    name = metadata.values.get("tokenizer.ggml.pre", "default")
    return _ALIASES.get(name, name) if isinstance(name, str) else name


def _byte_level(metadata: Metadata, splitter: str) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens: list[str] = metadata.values["tokenizer.ggml.tokens"]
    merges = [
        (left, right)
        for left, _, right in (merge.partition(" ") for merge in metadata.values["tokenizer.ggml.merges"])
    ]
    with panics_named(f"{metadata.source}: its tokenizer makes no sense"):
        vocab = {token: i for i, token in enumerate(tokens)}
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=splitter == "llama-bpe")
    tokenizer = Tokenizer(model)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if splitter == "smollm":
        # Every digit is a token, as in SmolLM's own tokenizer.json. transformers omits this rule, so "\n\n1"
        # starts with two tokens for the line ends, but the model is trained with one.
        first = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, byte_level])
    elif splitter in _PATTERNS:
        split = pre_tokenizers.Split(Regex(_PATTERNS[splitter]), "isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    else:
        tokenizer.pre_tokenizer = byte_level
    if splitter == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(metadata: Metadata) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens: list[str] = metadata.values["tokenizer.ggml.tokens"]
    types: list[int] = metadata.values["tokenizer.ggml.token_type"]
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    if unknown is None and (i := metadata.token("unknown")) is not None:
        unknown = tokens[i]
    with panics_named(f"{metadata.source}: its tokenizer makes no sense"):
        model = models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_merges(tokens, types, metadata.values["tokenizer.ggml.scores"]),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        )
    tokenizer = Tokenizer(model)
    has_prefix = metadata.values.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if has_prefix else spaces
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Return pairs that form a token, in the order of the tokens' scores: SentencePiece has no merges."""
    place = {token: i for i, token in enumerate(tokens) if types[i] not in (_CONTROL, _UNKNOWN, _BYTE)}
    ranked = []
    for token, i in place.items():
        splits = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [pair for pair in splits if pair[0] in place and pair[1] in place]
        ranked += [
            (-scores[i], i, pair) for pair in sorted(pairs, key=lambda pair: (place[pair[0]], place[pair[1]]))
        ]
    return [pair for _, _, pair in sorted(ranked, key=lambda one: one[:2])]


def _add_special(tokenizer: Any, metadata: Metadata) -> None:
    from tokenizers import AddedToken, processors

    tokens, types = metadata.values["tokenizer.ggml.tokens"], metadata.values["tokenizer.ggml.token_type"]
    pairs = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in pairs if kind == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=True) for token, kind in pairs if kind == _USER_DEFINED]
    )
    bos = metadata.token("bos")
    # llama.cpp adds the BOS token to texts of SentencePiece and of Llama 3 unless the file forbids it.
    default = metadata.values.get("tokenizer.ggml.model") == "llama" or _splitter(metadata) == "llama-bpe"
    if metadata.values.get("tokenizer.ggml.add_bos_token", default) and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """Return `tokenizer_config.json`."""
    tokens = metadata.values["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["context_length"],
        "clean_up_tokenization_spaces": False,
    }
    for name, key in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items():
        if (token := metadata.token(key)) is not None:
            config[f"{name}_token"] = tokens[token]
    if (template := metadata.values.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return config
