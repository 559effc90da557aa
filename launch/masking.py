"""Masking of secrets in command lines and texts: any value after a name such as --api-key or HF_TOKEN."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "(secret)"
"""Replacement of a secret in all output."""

_MIN_KNOWN = 8  # characters of a secret that is masked wherever it occurs; a shorter one may be a word
_SECRETS = {
    *("apikey", "accesskey", "secret", "secrets", "password", "passwd", "passphrase"),
    *("credential", "credentials", "authorization", "jwt"),
}
_KINDS_OF_KEYS = {"access", "admin", "api", "auth", "private", "secret"}  # words before `keys`
# Words before `key` in names of files, fields and parameters.
_KINDS_OF_NAMES = {
    *("answer", "cache", "column", "dataset", "dict", "field", "foreign", "group", "hash", "idempotency"),
    *("image", "index", "input", "json", "label", "output", "partition", "primary", "prompt", "public"),
    *("question", "routing", "sort", "ssl", "text", "tls"),
}
# Words before `token` in options about tokens of a text.
_KINDS_OF_TOKENS = {
    *("a", "audio", "bos", "by", "cls", "draft", "each", "end", "eos", "first", "image", "input", "last"),
    *("mask", "max", "min", "ms", "new", "next", "num", "output", "pad", "per", "prompt", "sep", "special"),
    *("start", "stop", "time", "unk", "us", "video"),
}
_NAME = re.compile(r"(?<![\w-])-{0,2}[A-Za-z][\w-]*")
_VALUE = r"""(?:"([^"]+)|'([^']+)|([^\s"'(,;\]})][^\s"',;\]})]*))"""
_IS = r"""["']?(?:=|\s{0,4}:\s{0,4}|\s{0,4}=\s{0,4}(?!-))\[?"""  # a key may begin with "-", but so do options
_SCHEME = r"(?i:bearer|basic)\s"
_ANY_SCHEME = r"[A-Za-z][A-Za-z-]{1,19}\s{1,4}"
_AFTER_NAME = re.compile(rf"{_IS}(?:{_SCHEME}(?!--)|(?!{_SCHEME})){_VALUE}")
_AFTER_AUTHORIZATION = re.compile(rf"{_IS}(?:{_SCHEME}(?!--)|{_ANY_SCHEME}(?!-)|(?!{_ANY_SCHEME}\()){_VALUE}")
# Further values in a list, up to an option or a name with a value.
_NAMED = r"""(?:"[^"]{0,99}"|'[^']{0,99}'|[\w.-]{1,99})\s{0,4}[=:]"""
_NEXT = rf"""["']?,\s{{0,4}}(?!["']-|{_NAMED})"""
_AFTER_OPTION = re.compile(rf"""(?:{_IS}|["']?\s{{1,4}}(?!-)|["'],\s{{0,4}}(?!["']-)){_VALUE}""")
_MORE = re.compile(rf"{_NEXT}{_VALUE}")
_MORE_OF_OPTION = re.compile(rf"""(?:["']?\s{{1,4}}(?!-)|{_NEXT}){_VALUE}""")
_PASSWORD = re.compile(r"(?<=://)([^\s/@]+)(?=@)")
_PLACEHOLDER = re.compile(r"\{\w{1,40}\}")


def holds_secret(name: str) -> bool:
    """Return whether the value of an option, a variable or a header of this name is a secret."""
    parts = [part for part in re.split(r"[^a-z0-9]+", name.lower()) if part]
    if not parts:
        return False
    before, last = parts[-2] if len(parts) > 1 else "", parts[-1]
    if last == "keys":
        return before in _KINDS_OF_KEYS
    if last == "key":
        return bool(before) and before not in _KINDS_OF_NAMES
    return last in _SECRETS or (last == "token" and before not in _KINDS_OF_TOKENS)


_known = {value for name, value in os.environ.items() if holds_secret(name) and len(value) >= _MIN_KNOWN}


def _hide(value: str) -> str:
    key = re.sub(rf"^{_SCHEME}", "", value)
    _known.update(one for one in (value, key) if len(one) >= _MIN_KNOWN and one != MASK)
    return MASK


def _patterns(name: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return the patterns of the first value after a name, and of each further value."""
    if name.startswith("-"):
        return _AFTER_OPTION, _MORE_OF_OPTION
    is_header = name.lower().endswith("authorization")
    return (_AFTER_AUTHORIZATION if is_header else _AFTER_NAME), _MORE


def without_known(text: str) -> str:
    """Return a text with all known secrets masked: secrets of this process's environment and options."""
    for value in _known:
        text = text.replace(value, MASK)
    return text


def without_known_bytes(data: bytes) -> bytes:
    """Return a program's output of the same size, with all known secrets overwritten by stars."""
    for value in _known:
        data = data.replace(value.encode(), b"*" * len(value.encode()))
    return data


def masked(text: str) -> str:
    """Return an option's text with its secrets masked: passwords in URLs, and values of key-like names."""
    pieces, end = [], 0
    for name in _NAME.finditer(text):
        if name.start() < end or not holds_secret(name[0]):
            continue
        after, more = _patterns(name[0])
        value = after.match(text, name.end())
        while value and (n := value.lastindex):  # vLLM's option may have several
            pieces += [text[end : value.start(n)], _hide(value[n])]
            end = value.end(n)
            value = more.match(text, end)
    text = "".join([*pieces, text[end:]])
    return without_known(_PASSWORD.sub(lambda match: _hide(match[0]), text))


def masked_args(args: Sequence[str]) -> list[str]:
    """Return a command line with its secrets masked: all arguments between a key-like option and the next."""
    safe, is_secret = [], False
    for arg in args:
        name, equals, value = arg.partition("=")
        if arg.startswith("-") and len(name.split()) == 1:
            is_secret = holds_secret(name) and not equals
            safe_value = _hide(value) if value and holds_secret(name) else masked(value)
            safe.append(f"{name}{equals}{safe_value}")
        else:
            hides = is_secret and not _PLACEHOLDER.fullmatch(arg)
            safe.append(_hide(arg) if hides else masked(arg))
    return safe


def learn_secrets(args: Sequence[str]) -> None:
    """Add the secrets of a command line to the known secrets."""
    masked_args(args)


def masked_command(text: str) -> str:
    """Return a command line in shell syntax, with its secrets masked."""
    try:
        args = shlex.split(text)
    except ValueError:
        return masked(text)
    return text if (safe := masked_args(args)) == args else shlex.join(safe)


def masked_value(value: Any) -> Any:
    """Return an option's value with its secrets masked: a text, arguments, or a dictionary of these."""
    if isinstance(value, str):
        prefix, is_command, command = value.partition("command:")
        return f"command:{masked_command(command)}" if is_command and not prefix else masked(value)
    if isinstance(value, Mapping):
        return {
            key: _hide(str(one)) if holds_secret(str(key)) and one else masked_value(one)
            for key, one in value.items()
        }
    if isinstance(value, (list, tuple)):
        is_args = all(type(one) is str for one in value)
        safe = masked_args(value) if is_args else [*map(masked_value, value)]
        return tuple(safe) if isinstance(value, tuple) else safe
    return value
