"""Parsers of options: functions that turn a text into a value or raise ValueError, with the expected form."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from disagg.errors import nearest
from launch.masking import MASK, learn_secrets, masked_value
from mpillm.core_names import OTHER, NamedKinds
from mpillm.options.field import Reason

F = TypeVar("F", bound=Callable[[str], Any])
N = TypeVar("N", int, float)

_MAX_INT = 2**31 - 1  # token ids, lengths and counts travel as 32-bit integers
_MAX_SECONDS = 1e9  # 30 years, which fit the clocks of LoadGen and of the system


def expects(
    expected: str, to_text: Callable[[Any], str] = str, *, reads_dict: bool = False
) -> Callable[[F], F]:
    """Declare the text that a parser expects.

    `to_text` turns a file's value (a number, a list) into text for the parser. `reads_dict`: the field also
    accepts dictionaries.
    """

    def mark(function: F) -> F:
        vars(function).update(expects=expected, to_text=to_text, reads_dict=reads_dict)
        return function

    return mark


def _integer(text: str) -> int:
    """Return an int; reject the forms that only Python accepts: 1_000, digits of other scripts."""
    if "_" in text or not text.isascii():
        raise ValueError(text)
    return int(text)


def _number(text: str) -> float:
    """Return a finite float; reject the same forms as `_integer`."""
    if "_" in text or not text.isascii() or not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value


def _listed(value: Any) -> str:
    if not isinstance(value, (list, tuple)):
        return str(value)
    return ",".join(str(item.value if isinstance(item, enum.Enum) else item) for item in value)


def _paired(value: Any) -> str:
    return ",".join(f"{key}:{item}" for key, item in value.items()) if isinstance(value, dict) else str(value)


@expects("key:value,key:value", _paired, reads_dict=True)
def flag_dict(text: str) -> dict[str, Any]:
    """``key1:value1,key2:value2``; a value is a bool, None, int, float, or else text."""
    result: dict[str, Any] = {}
    for pair in text.split(",") if text.strip() else ():
        key, colon, value = pair.partition(":")
        if not (colon and key.strip() and value.strip()):
            raise Reason(f"'{pair}' is not key:value")
        read = _literal(value.strip())
        if result.setdefault(key.strip(), read) != read:
            raise Reason(f"{key.strip()} occurs twice, with different values")
    return result


def _literal(text: str) -> bool | int | float | str | None:
    literals = {"true": True, "false": False, "none": None}
    if text.lower() in literals:
        return literals[text.lower()]
    for kind in (_integer, _number):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@expects("true or false")
def boolean(text: str) -> bool:
    """true or false, as words or digits."""
    value = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(text.lower())
    if value is None:
        raise ValueError(text)
    return value


@expects(f"a whole number of at least 1 and at most {_MAX_INT}")
def positive(text: str) -> int:
    """Return an int of at least 1."""
    return _between(_integer(text), 1, _MAX_INT)


@expects("1 or 2")
def one_or_two(text: str) -> int:
    """Return 1 or 2."""
    return int(_between(_integer(text), 1, 2))


@expects(f"a whole number of at least 0 and at most {_MAX_INT}")
def natural(text: str) -> int:
    """Return an int of at least 0."""
    return _between(_integer(text), 0, _MAX_INT)


@expects("whole numbers of at least 1, separated by commas", _listed)
def integers(text: str) -> tuple[int, ...]:
    """Ints of at least 1, separated by commas."""
    return tuple(map(positive, text.split(",")))


def _shell_text(args: Sequence[str]) -> str:
    text = shlex.join(args)
    # argparse takes a text without a blank for one of its own options.
    return f"{text} " if text.startswith("-") and " " not in text else text


@expects("words as in a shell", _shell_text)
def shell_args(text: str) -> tuple[str, ...]:
    """Arguments as in a shell, quoted if they contain blanks."""
    args = tuple(shlex.split(text))
    learn_secrets(args)
    return args


@expects("token ids separated by commas", _listed)
def token_ids(text: str) -> tuple[int, ...]:
    """Ints of at least 0, separated by commas."""
    return tuple(map(natural, text.split(",")))


SET_FIELDS = frozenset(
    {
        *("model", "prompt", "messages", "input", "instructions", "tools", "n", "stream", "stream_options"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "cache_salt"),
        *("return_token_ids", "detokenize"),
    }
)
"""Fields of requests that mpillm sets: no option and no row of a data set adds them."""
# Those that options set for all requests, and a row of a data set for its own.
_SAMPLING_FIELDS = {
    *("seed", "temperature", "top_p", "top_k", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
}
# Headers of the requests' transport.
_OWN_HEADERS = {
    *("host", "content-type", "content-length", "content-encoding", "transfer-encoding", "connection"),
    *("expect", "upgrade", "accept-encoding", "x-session-id"),
}
_PATH = re.compile(r"/[!-~]{0,1000}")
_MAX_MODEL_NAME = 1000  # characters
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    masked_value(value)  # registers its secrets
    return value


@expects('a JSON object, such as {"priority": 1}', json.dumps, reads_dict=True)
def body_fields(text: str) -> dict[str, Any]:
    """Return fields that are added to the body of each request."""
    fields = _json_object(text)
    if own := sorted((SET_FIELDS | _SAMPLING_FIELDS) & fields.keys()):
        raise Reason(f"mpillm sets {own[0]} by itself, from other options and the data set")
    return fields


def is_header_value(text: str) -> bool:
    """Return whether a text can be the value of a header."""
    return text.isprintable() and text.isascii() and len(text) <= 8192


@expects('a JSON object of texts, such as {"X-Tenant": "a"}', json.dumps, reads_dict=True)
def headers(text: str) -> dict[str, str]:
    """Return headers that are added to each request."""
    fields = _json_object(text)
    for name, value in fields.items():
        if not _HEADER_NAME.fullmatch(name) or name.lower() in _OWN_HEADERS:
            raise Reason(f"{name!r} is not a header that can be added")
        if not isinstance(value, str) or not is_header_value(value):
            raise Reason(f"the value of {name} must be printable ASCII text of at most 8,192 characters")
    return fields


@expects("the name of a header, such as X-Session-ID")
def session_header(text: str) -> str:
    """Return the name of a header whose value mpillm sets."""
    if not _HEADER_NAME.fullmatch(text) or text.lower() in _OWN_HEADERS - {"x-session-id"}:
        raise Reason(f"{text!r} is not a header that can be added")
    return text


def key_values(text: str, keys: Collection[str]) -> dict[str, str]:
    """Return the values of ``key=value,key=value`` by key. Raises Reason for an unknown or repeated key."""
    values: dict[str, str] = {}
    for pair in text.split(","):
        key, _, value = (part.strip() for part in pair.partition("="))
        if key not in keys:
            raise Reason(f"no key {key!r}{nearest(key, keys)}: {', '.join(keys)}")
        if key in values:
            raise Reason(f"{key} occurs twice")
        values[key] = value
    return values


def joined_key_values(value: Any) -> str:
    """Return the text of a dictionary, for `key_values`."""
    return ",".join(f"{key}={one}" for key, one in value.items()) if isinstance(value, dict) else str(value)


@expects("a path of a URL, such as /openai/chat/completions")
def url_path(text: str) -> str:
    """Return the path of a URL, which may have a query."""
    if not _PATH.fullmatch(text):
        raise Reason("it must begin with / and be printable ASCII text without blanks")
    return text


@expects("names of models separated by commas", _listed)
def model_names(text: str) -> tuple[str, ...]:
    """Return models' names, each once."""
    return _each_once(text.split(","), _model_name)


def _model_name(name: str) -> None:
    if not name or not name.isprintable() or len(name) > _MAX_MODEL_NAME:
        raise Reason(f"{name[:_MAX_MODEL_NAME]!r} is not a model's name")


_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}  # in seconds
_DAY = 86400.0
_AS = "as 600s, 10min or 600000ms; a bare number is seconds"


def _in_seconds(text: str) -> float:
    text = text.strip()
    unit = next(filter(text.endswith, _UNITS), "")
    return _number(text.removesuffix(unit).strip()) * _UNITS[unit or "s"]


@expects(f"a duration above 0, {_AS}")
def seconds(text: str) -> float:
    """Return a duration above 0, in seconds."""
    return _above(_in_seconds(text), 0, _MAX_SECONDS)


@expects(f"a duration of at most a day, {_AS}")
def length_of_a_test(text: str) -> float:
    """Return a duration of at least 0, in seconds.

    More than a day is a mistake: most likely milliseconds, the unit of NVIDIA's min_duration.
    """
    value = _between(_in_seconds(text), 0, _MAX_SECONDS)
    if value > _DAY:
        bare = text.strip()[-1].isdigit()
        why = f"{text.strip()}{' s' if bare else ''} are {_spelled(value)}"
        if bare:
            why += f"; {text.strip()} ms, as NVIDIA's min_duration counts, are {_spelled(value / 1000)}:"
            why += f" write {text.strip()}ms"
        raise Reason(why)
    return value


def _spelled(seconds: float) -> str:
    for unit, size in (("days", _DAY), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


@expects("a number above 0 and up to 1000000000")
def rate(text: str) -> float:
    """Queries per second."""
    return _above(_number(text), 0, 1e9)


@expects("a number above 0 and up to 1000, or inf")
def shape_of_gamma(text: str) -> float:
    """Return the shape of a gamma distribution. Infinite: without variation."""
    return math.inf if text == "inf" else _above(_number(text), 0, 1000)


@expects("a number above 0 and up to 1000000")
def gigabytes(text: str) -> float:
    """Gigabytes of memory."""
    return _above(_number(text), 0, 1e6)


@expects("a number of at least 0")
def not_negative(text: str) -> float:
    """Return a number of at least 0."""
    return _between(_number(text), 0, math.inf)


@expects("a number of at least 1")
def one_or_more(text: str) -> float:
    """Return a number of at least 1."""
    return _between(_number(text), 1, math.inf)


@expects("a number above 0 and up to 1")
def fraction(text: str) -> float:
    """Return a number above 0 and up to 1."""
    return _above(_number(text), 0, 1)


@expects("a number above 0 and up to 100, percent")
def percent(text: str) -> float:
    """Return a number above 0 and up to 100."""
    return _above(_number(text), 0, 100)


def _json_list(value: Any) -> str:
    return json.dumps(value if isinstance(value, (list, tuple)) else [value], default=str)


@expects('a word, or a JSON array of words and arrays of token ids, such as ["###", [13, 13]]', _json_list)
def stop_words(text: str) -> list[str | list[int]]:
    """Return one word, or a JSON array of words and of arrays of token ids."""
    entries = json.loads(text) if text.startswith("[") else [text]
    for entry in entries:
        ids = isinstance(entry, list) and all(
            type(token) is int and 0 <= token <= _MAX_INT for token in entry
        )
        if not entry or not (ids or isinstance(entry, str)):
            raise ValueError(text)
    return list(entries)


@expects("0.99 or 0.999")
def accuracy(text: str) -> float:
    """Return the share of the reference accuracy to reach: 0.99 or 0.999, also written 99 or 99.9."""
    value = _number(text)
    value = round(value / 100, 6) if value > 1 else value
    if value not in (0.99, 0.999):
        raise ValueError(text)
    return value


def batch_sizes(workloads: Callable[[str], tuple[str, ...]]) -> Callable[[str], int | dict[str, int]]:
    """Make a parser of one batch size, or of one for each workload. `workloads` parses a workload's name."""

    @expects("a batch size, or workload:size,workload:size", _paired)
    def parse(text: str) -> int | dict[str, int]:
        if ":" not in text:
            return positive(text)
        sizes: dict[str, int] = {}
        for pair in text.split(","):
            name, colon, size = pair.partition(":")
            if not colon:
                raise Reason(f"'{pair}' is not workload:size")
            (workload,) = workloads(name)
            try:
                read = positive(size)
            except ValueError:
                raise Reason(f"'{size}' is not a whole number of at least 1") from None
            if sizes.setdefault(workload, read) != read:
                raise Reason(f"{workload} occurs twice, with different sizes")
        return sizes

    return parse


@expects("host:port,host:port", _listed)
def urls(text: str) -> tuple[str, ...]:
    """Servers as ``host:port,host:port``, each once."""
    return _each_once(text.split(","), _address)


@expects("host:port,host:port", _listed)
def http_urls(text: str) -> tuple[str, ...]:
    """Return servers as `urls` does. Servers may also be URLs, which lose a final ``/v1``."""
    return _each_once([re.sub(r"(?<=[^/])(/v1)?/*$", "", url.strip()) for url in text.split(",")], _http_url)


def _http_url(url: str) -> None:
    if not re.match(r"https?://[^\s/:]", url):
        _address(url)
    elif "/v1/" in url:
        raise Reason(f"'{url}' continues after /v1")


def _each_once(texts: Sequence[str], check: Callable[[str], object]) -> tuple[str, ...]:
    stripped = tuple(url.strip() for url in texts)
    for url in stripped:
        check(url)
        if stripped.count(url) > 1:
            raise Reason(f"'{url}' occurs twice")
    return stripped


def _address(url: str) -> None:
    host, _, number = url.rpartition(":")
    if not re.fullmatch(r"[^\s/]+", host):
        raise Reason(f"'{url}' is not host:port")
    port(number)


def _hosts(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return "|".join(f"{host}:{_listed(ports)}" for host, ports in value.items())


@expects("host_0:port_0,port_1|host_1:port_0,port_1", _hosts)
def grpc_ports(text: str) -> dict[str, tuple[int, ...]]:
    """Return the ports of each host's servers: ``host_0:port_0,port_1|host_1:port_0,port_1``."""
    result: dict[str, tuple[int, ...]] = {}
    for part in text.split("|"):
        host, colon, ports = part.partition(":")
        if not colon or not host.strip():
            raise Reason(f"'{part}' is not host:port,port")
        if host.strip() in result:
            raise Reason(f"host {host.strip()} occurs twice")
        result[host.strip()] = tuple(map(port, ports.split(",")))
        if len(set(result[host.strip()])) < len(result[host.strip()]):
            raise Reason(f"a port of host {host.strip()} occurs twice")
    return result


@expects("a port, 1 to 65535")
def port(text: str) -> int:
    """Return a TCP port."""
    number = int(text) if re.fullmatch(r"\s*[0-9]{1,5}\s*", text) else 0
    if not 0 < number < 65536:
        raise Reason(f"'{text}' is not a port, 1 to 65535")
    return number


@expects("a port, 1 to 65535, or 0 for any that is free")
def port_or_any(text: str) -> int:
    """Return a TCP port, or 0."""
    return 0 if text.strip() == "0" else port(text)


@dataclasses.dataclass(frozen=True, repr=False)
class Secret:
    """A text that no file and no message contains."""

    text: str

    def __str__(self) -> str:
        return MASK

    __repr__ = __str__


@expects("a text that is not empty")
def secret(text: str) -> Secret:
    """Return an API key, or another secret."""
    if not text.strip():
        raise ValueError
    return Secret(text)


def names(*known: str, **aliases: str) -> Callable[[str], tuple[str, ...]]:
    """Make a parser of a list of `known` names or `aliases`, in any letter case, separated by commas."""
    by_name = {name.lower(): name for name in known} | aliases

    @expects(f"one or several of {', '.join(known)}, separated by commas", _listed)
    def parse(text: str) -> tuple[str, ...]:
        chosen: list[str] = []
        for word in map(str.strip, text.split(",")):
            name = by_name.get(word.lower())
            if name is None:
                raise Reason(f"there is no {word or 'empty name'}{nearest(word.lower(), by_name)}")
            chosen.append(name)
        return tuple(dict.fromkeys(chosen))

    return parse


def one_of(*known: str, **others: str) -> Callable[[str], str]:
    """Make a parser of one name in `known`, or an alias in `others`, in any letter case."""
    by_name = {name.lower(): name for name in known} | others

    @expects(f"one of {', '.join(known)}")
    def parse(text: str) -> str:
        name = by_name.get(text.lower())
        if name is None:
            raise _unknown(text, by_name)
        return name

    return parse


def name_or_class(
    known: Collection[str],
    installed: Callable[[], Iterable[str]] = tuple,
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[str], str]:
    """Make a parser of a `known` name, a name in `installed()`, or ``package.module:Class``.

    `installed` is called only if the name is not known. `aliases`: known names by their other names.
    """

    @expects(f"{', '.join(known)}, or package.module:Class")
    def parse(text: str) -> str:
        if ":" in text:
            return text
        if text.lower() in aliases:
            return aliases[text.lower()]
        if text.lower() in known:
            return text.lower()
        names = {*known, *installed()}
        if text not in names:
            raise _unknown(text, names)
        return text

    return parse


def kind_of_program(kinds: NamedKinds[Any], *more: str) -> Callable[[str], str]:
    """Make a parser of the name of a kind of program, in any letter case, or of ``command:WORDS``.

    `more`: further names.
    """
    names = (*more, *kinds.built_in)

    @expects(f"{', '.join(names)}, or {OTHER}WORDS")
    def parse(text: str) -> str:
        if text.lower() in names:
            return text.lower()
        try:
            kinds.kind_of(text)
        except ValueError as error:
            raise Reason(str(error)) from None
        masked_value(text)  # registers its secrets
        return text

    return parse


def _unknown(text: str, known: Iterable[str]) -> ValueError:
    hint = nearest(text.lower(), known)
    return Reason(hint.strip(" ()")) if hint else ValueError(text)


def _between(value: N, min_value: float, max_value: float) -> N:
    if not min_value <= value <= max_value:
        raise ValueError(value)
    return value


def _above(value: float, limit: float, max_value: float) -> float:
    if not limit < value <= max_value:
        raise ValueError(value)
    return value
