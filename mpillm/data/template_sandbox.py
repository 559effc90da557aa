"""The Jinja environment of chat templates, which come with models from anywhere.

Jinja's sandbox lets a template call nothing that it should not; here one also has an allowance for each chat,
of steps and of characters that it makes: a few bytes could ask for hours, or for all memory.
"""

from __future__ import annotations

import functools
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import jinja2
import jinja2.sandbox
from jinja2 import nodes, runtime
from jinja2.visitor import NodeTransformer

_MOST = 1 << 26  # characters that are made, besides
_OF_CHARACTER, _OF_MESSAGE = 64, 8  # characters; rounds through all of the template
# Characters that take as long as a step, a round of a loop, each part of its body, and each part of a value.
_STEP, _ROUND, _PART, _ITEM = 256, 64, 8, 32
# Filters and methods that may make the product of what they are given, or a width that is a number.
_MULTIPLY = frozenset(
    {
        *("batch", "center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "replace"),
        *("rjust", "slice", "tojson", "translate", "wordwrap", "xmlattr", "zfill"),
    }
)
_WIDTH = re.compile(r"\d{5}|%[^a-zA-Z]*\*")  # in a text that says how to format others
_FORMAT = ("format", "format_map")
_AT_ONCE = ("count", "d", "default", "first", "last", "length")  # filters, however much a value holds
_EACH = ("map", "reject", "rejectattr", "select", "selectattr")  # filters that call others, or tests
_COMPARE = (
    "!=",
    "<",
    "<=",
    "==",
    ">",
    ">=",
    "eq",
    "equalto",
    "ge",
    "greaterthan",
    "gt",
    "in",
    "le",
    "lessthan",
    "lt",
    "ne",
)
_LOOPED, _COUNTED, _SLICED = "mpillm looped", "mpillm counted", "mpillm sliced"


class _Allowance(threading.local):
    """Characters that are left, of the chat that a thread renders."""

    left = 0


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Raises TemplateError where a template takes too much."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self._counted, **options)
        self._mine = _Allowance()
        self._round = 0
        self.globals.pop("lipsum")

    def bound(self) -> None:
        """Count what filters make and tests compare, once all are there."""
        self.filters.update({name: self._bounded(name, made) for name, made in self.filters.items()})
        tests: dict[str, Any] = self.tests
        tests.update({name: self._compared(tests[name]) for name in _COMPARE})
        self.filters.update({_LOOPED: self._looped, _COUNTED: self._counted, _SLICED: self._sliced})

    def begin(self, template: str, messages: Sequence[Mapping[str, Any]] = ()) -> None:
        """Give an allowance: to compile the template, or for a chat."""
        self._round = _STEP + len(template)
        n_characters = sum(len(str(message.get("content"))) for message in messages)
        self._mine.left = _MOST + n_characters * _OF_CHARACTER
        self._mine.left += len(messages) * _OF_MESSAGE * (self._round + 16 * _STEP)

    def call(self, context: Any, called: Any, *args: Any, **options: Any) -> Any:
        if isinstance(called, (runtime.Macro, runtime.LoopContext)):
            self._spend(self._round + 12 * _STEP)
        if isinstance(called, runtime.LoopContext) and args:
            args = (self._looped(args[0], self._round), *args[1:])
        given = [*args, *options.values()]
        method = getattr(called, "__wrapped__", called)  # the sandbox has str.format in a function of its own
        if isinstance(owner := getattr(method, "__self__", None), (str, list, tuple)):
            given.append(owner)
        self._operate(getattr(called, "__name__", ""), given)
        return super().call(context, called, *args, **options)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if type(left) is str and type(right) is str:  # nearly always
                self._mine.left -= len(left) + len(right)
                left += right
                return left if self._mine.left >= 0 else self._spend(0)
            self._spend(_flat(left) + _size(right))  # which becomes part of a list
        elif isinstance(left, int) and isinstance(right, int):
            self._spend(left.bit_length() * (abs(right) if operator == "**" else right.bit_length()))
        else:
            self._operate("format" if operator == "%" else "replace", (left, right))
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        made = _Counting().visit(tree)
        assert isinstance(made, nodes.Template)
        made.set_environment(self)
        return made

    def _bounded(self, name: str, made: Callable[..., Any]) -> Callable[..., Any]:
        first = 1 if hasattr(made, "jinja_pass_arg") else 0  # argument that is not Jinja's own

        @functools.wraps(made)
        def bounded(*args: Any, **options: Any) -> Any:
            self._operate(name, (*args[first:], *options.values()))
            if name in _EACH:
                args = (*args[:first], self._looped(args[first], _STEP), *args[first + 1 :])
            return made(*args, **options)

        return bounded

    def _looped(self, values: Any, price: int) -> Any:
        if isinstance(values, Sized):
            self._spend(price * len(values))
            return values
        return self._each(values, price)

    def _each(self, values: Any, price: int) -> Iterator[Any]:
        for value in values:
            self._spend(price)
            yield value

    def _counted(self, value: Any) -> Any:
        if type(value) is str:
            self._mine.left -= len(value)
        else:
            self._mine.left -= value.bit_length() if isinstance(value, int) else _size(value)
        return value if self._mine.left >= 0 else self._spend(0)

    def _sliced(self, value: Any) -> Any:
        self._spend(_flat(value))
        return value

    def _compared(self, test: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
        return lambda value, other: test(self._counted(value), self._counted(other))

    def _operate(self, name: str, given: Sequence[Any]) -> None:
        if name in _AT_ONCE:
            self._spend(_STEP)
            return
        if name in _MULTIPLY:
            if name in _FORMAT and any(isinstance(one, str) and _WIDTH.search(one) for one in given):
                raise jinja2.TemplateError("a width of five digits, or of what is formatted")
            self._spend(_STEP + math.prod(max(1, _size(one)) for one in given))
            return
        n = _STEP
        for one in given:
            n += len(one) if type(one) is str else _size(one)
        self._spend(n)

    def _spend(self, n: int) -> None:
        self._mine.left -= n
        if self._mine.left < 0:
            raise jinja2.TemplateError("it takes too long, or too much memory")


class _Counting(NodeTransformer):
    """Has a template count its rounds, and what it puts together, makes a list of, compares or copies."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        price = nodes.Const(_ROUND + _price([*node.body, *node.else_, *filter(None, [node.test])]))
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _LOOPED, [price], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_filtered(one, _COUNTED) for one in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filtered(node.expr, _COUNTED)
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, _COUNTED)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered(node.node, _SLICED)
        return node

    def _made(self, node: Any) -> Any:
        self.generic_visit(node)
        return node if _is_constant(node) else _filtered(node, _COUNTED)

    visit_List = visit_Tuple = visit_Dict = _made


def _is_constant(node: nodes.Node) -> bool:
    """Return whether a list, or the like, holds nothing that a template has made; or is where values go."""
    if getattr(node, "ctx", "load") != "load":
        return True
    return all(isinstance(one, (nodes.Const, nodes.Pair)) for one in node.find_all((nodes.Expr, nodes.Pair)))


def _price(body: Sequence[nodes.Node]) -> int:
    """Return what a round of a loop counts as: parts of its body, and what it prints, without loops in it."""
    price = 0
    for node in body:
        price += _PART + len(str(getattr(node, "data", "")))
        if not isinstance(node, (nodes.For, nodes.Macro)):
            price += _price([*node.iter_child_nodes()])
    return price


def _filtered(node: Any, name: str) -> Any:
    if isinstance(node, nodes.Const):
        return node
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _flat(value: Any) -> int:
    """Return as `_size`, of what holds others without them."""
    return _ITEM * len(value) if isinstance(value, (list, tuple)) else _size(value)


def _size(value: Any, seen: dict[int, int] | None = None) -> int:
    """Return how many characters, or parts, a value has when it is printed; of a number, the number."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int):
        return min(abs(value), 1 << 40)
    if isinstance(value, range):
        return _STEP * len(value)
    if not isinstance(value, (list, tuple, Mapping)):
        return 1
    seen = {} if seen is None else seen
    if id(value) not in seen:  # a list may have the same one many times, and so on
        seen[id(value)] = 0
        inner = (*value.keys(), *value.values()) if isinstance(value, Mapping) else value
        seen[id(value)] = _ITEM + sum(
            _ITEM + (0 if isinstance(one, int) else _size(one, seen)) for one in inner
        )
    return seen[id(value)]
