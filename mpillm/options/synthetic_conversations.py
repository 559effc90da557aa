"""Values of `--synthetic_conversations`: ``turns=5,input=200:40,output=150,delay=0.5-2``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from mpillm.options.field import Reason
from mpillm.options.parsers import expects, joined_key_values, key_values, not_negative

MAX_TURNS, _MAX_TOKENS, _MAX_DELAY_S = 1000, 1 << 24, 1e6
_LOG_NORMAL = "lognormal:"


class Normal(NamedTuple):
    """Normal distribution; with `stdev` 0, each value is `mean`."""

    mean: float
    stdev: float = 0.0
    is_log: bool = False  # the values' logarithm is normal; mean and stdev are those of the values

    def __str__(self) -> str:
        kind = "log-normal" if self.is_log else "normal"
        return f"{self.mean:g} ± {self.stdev:g} ({kind})" if self.stdev else f"{self.mean:g}"


class Uniform(NamedTuple):
    """Uniform distribution. Whole numbers include both limits."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g} (uniform)"

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2


Spread: TypeAlias = "Normal | Uniform"


@dataclass(frozen=True, slots=True)
class ConversationSizes:
    """Sizes of conversations. `turns` is drawn for each conversation, the other spreads for each turn."""

    turns: Spread
    input: Spread  # tokens that a request adds to the conversation
    output: Spread  # tokens of a response
    delay: Spread  # seconds from a response to the next request
    system: int  # tokens at the beginning of all conversations
    groups: int  # of conversations; the conversations of a group share a prefix
    prefix: int  # tokens of this prefix, after those of `system`
    zipf: float  # exponent: group `i` has 1 / (i + 1)**zipf of the conversations of group 0

    def describe(self) -> str:
        """Return the values, as text for users."""
        shared = f", {self.prefix} shared by each of {self.groups} groups" if self.prefix else ""
        shared += f" (Zipf, exponent {self.zipf:g})" if self.zipf else ""
        return (
            f"{self.turns} turns; input {self.input} and output {self.output} tokens in each turn;"
            f" delay {self.delay} s; {self.system} tokens shared by all{shared}"
        )


class _Key(NamedTuple):
    default: str
    low: float
    high: float
    has_spread: bool = True
    is_integer: bool = True


# The defaults of input and output are those of --dataset synthetic.
_KEYS = {
    "turns": _Key("5", 1, MAX_TURNS),
    "input": _Key("128", 1, _MAX_TOKENS),
    "output": _Key("32", 1, _MAX_TOKENS),
    "delay": _Key("0", 0, _MAX_DELAY_S, is_integer=False),
    "system": _Key("0", 0, _MAX_TOKENS, has_spread=False),
    "groups": _Key("1", 1, _MAX_TOKENS, has_spread=False),
    "prefix": _Key("0", 0, _MAX_TOKENS, has_spread=False),
    "zipf": _Key("0", 0, 10, has_spread=False, is_integer=False),
}


@expects("key=value,key=value, such as turns=5,input=200:40,output=150,delay=0.5-2", joined_key_values)
def synthetic_conversations(text: str) -> dict[str, str]:
    """Return the value of each key, as text; see `sizes_of`."""
    values = key_values(text, _KEYS)
    complete = {key: values.get(key, kind.default) for key, kind in _KEYS.items()}
    sizes = sizes_of(complete)
    if sizes.groups > 1 and not sizes.prefix:
        raise Reason("groups has no effect without prefix, the tokens that a group shares")
    if sizes.zipf and sizes.groups == 1:
        raise Reason("zipf has no effect without groups, which differ in size")
    return complete


def sizes_of(values: Mapping[str, str]) -> ConversationSizes:
    """Return the sizes of all keys. Raises Reason for a wrong value."""
    parsed = {key: _parsed(key, values[key]) for key in _KEYS}
    plain = {
        key: int(parsed[key].mean) if kind.is_integer else parsed[key].mean
        for key, kind in _KEYS.items()
        if not kind.has_spread
    }
    return ConversationSizes(**{**parsed, **plain})  # type: ignore[arg-type]


def _parsed(key: str, text: str) -> Spread:
    kind = _KEYS[key]
    try:
        spread = _spread(text) if kind.has_spread else Normal(not_negative(text))
    except ValueError:
        raise Reason(f"{key}={text}: {_expected(kind)}") from None
    limits = spread if isinstance(spread, Uniform) else spread[:1]
    is_rounded = isinstance(spread, Normal) and spread.stdev
    are_valid = all(kind.low <= limit <= kind.high for limit in limits)
    if not are_valid or (kind.is_integer and not is_rounded and not all(map(float.is_integer, limits))):
        raise Reason(f"{key}={text}: {_expected(kind)}")
    return spread


def _spread(text: str) -> Spread:
    is_log = text.startswith(_LOG_NORMAL)
    mean, colon, stdev = text.removeprefix(_LOG_NORMAL).partition(":")
    low, dash, high = text.partition("-")
    if colon or is_log:
        return Normal(not_negative(mean), not_negative(stdev), is_log)
    if dash:
        limits = Uniform(not_negative(low), not_negative(high))
        if limits.low > limits.high:
            raise ValueError(text)
        return limits
    return Normal(not_negative(text))


def _expected(kind: _Key) -> str:
    forms = "N, MEAN:STDEV, lognormal:MEAN:STDEV or MIN-MAX" if kind.has_spread else "N"
    return (
        f"must be {forms}, {'whole ' if kind.is_integer else ''}numbers from {kind.low:g} to {kind.high:.8g}"
    )
