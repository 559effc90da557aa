"""The Jinja environment of chat templates, which come with models from anywhere.

Jinja's sandbox lets a template call nothing that it should not. Here it also has an allowance for each chat,
since a few bytes could ask for hours, or for all memory. From it the template pays, in characters,

- for values that it puts together, prints, lists, compares or copies: their size (`_size_of`);
- for a round of a loop: as many characters as take as long (`_price_of_round`);
- for a call of a filter, method or function: the sizes of what it is given, or their product where it may
  make that (`_price_of_call`).

Jinja hands calls and arithmetic to the environment. Of the rest nobody is told, so a template is changed
before it is compiled (`_Counting`): filters of ours stand around what must be paid for.
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

# The allowance of a chat: what any may take, and more for each character and message of it.
_ANY_CHAT = 1 << 26
_FOR_A_CHARACTER = 64
_ROUNDS_FOR_A_MESSAGE = 8  # through all of the template

# In characters that take as long: a step, such as a call; a round of a loop, and each part of its body; a
# part of a list or the like.
_STEP, _ROUND, _PART, _ITEM = 256, 64, 8, 32
_MACRO_STEPS, _MESSAGE_STEPS = 12, 16

# Filters and methods that may make the product of what they are given, or a width that is a number.
_MULTIPLY = frozenset(
    {
        *("batch", "center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "replace"),
        *("rjust", "slice", "tojson", "translate", "wordwrap", "xmlattr", "zfill"),
    }
)
_FORMAT = ("format", "format_map")
_WIDTH = re.compile(r"\d{5}|%[^a-zA-Z%]*\*")  # in a text that says how to format others
_AT_ONCE = ("count", "d", "default", "first", "last", "length")  # filters, however much a value holds
_EACH = ("map", "reject", "rejectattr", "select", "selectattr")  # filters that call others, or tests
_COMPARE = (
    *("!=", "<", "<=", "==", ">", ">=", "in"),
    *("eq", "equalto", "ge", "greaterthan", "gt", "le", "lessthan", "lt", "ne"),
)
# The filters that `_Counting` writes into templates.
_PAY_ROUNDS, _PAY_SIZE, _PAY_COPY = "mpillm rounds", "mpillm size", "mpillm copy"


class _Allowance(threading.local):
    """Characters that are left, of the chat that a thread renders."""

    left = 0

    def pay(self, n: int) -> None:
        """Raise TemplateError if there are no more."""
        self.left -= n
        if self.left < 0:
            raise jinja2.TemplateError("it takes too long, or too much memory")


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Raises TemplateError where a template takes too much."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self._pay_size, **options)
        self._allowance = _Allowance()
        self._all_of_it = 0  # a round through the template
        self.globals.pop("lipsum")

    def bound(self) -> None:
        """Have filters and tests pay, once all are there."""
        self.filters.update({name: self._paying_filter(name, made) for name, made in self.filters.items()})
        tests: dict[str, Any] = self.tests
        tests.update({name: self._paying_test(tests[name]) for name in _COMPARE})
        ours = {_PAY_ROUNDS: self._pay_rounds, _PAY_SIZE: self._pay_size, _PAY_COPY: self._pay_copy}
        self.filters.update(ours)

    def begin(self, template: str, messages: Sequence[Mapping[str, Any]] = ()) -> None:
        """Give an allowance: to compile the template, or for a chat."""
        self._all_of_it = _STEP + len(template)
        n_characters = sum(len(str(message.get("content"))) for message in messages)
        for_a_message = _ROUNDS_FOR_A_MESSAGE * (self._all_of_it + _MESSAGE_STEPS * _STEP)
        self._allowance.left = _ANY_CHAT + _FOR_A_CHARACTER * n_characters + for_a_message * len(messages)

    # --- what Jinja hands to the environment ---

    def call(self, context: Any, called: Any, *args: Any, **options: Any) -> Any:
        if isinstance(called, (runtime.Macro, runtime.LoopContext)):
            self._allowance.pay(self._all_of_it + _MACRO_STEPS * _STEP)
        if isinstance(called, runtime.LoopContext) and args:
            args = (self._pay_rounds(args[0], self._all_of_it), *args[1:])
        given = [*args, *options.values()]
        method = getattr(called, "__wrapped__", called)  # the sandbox has str.format in a function of its own
        if isinstance(owner := getattr(method, "__self__", None), (str, list, tuple)):
            given.append(owner)
        self._allowance.pay(_price_of_call(getattr(called, "__name__", ""), given))
        return super().call(context, called, *args, **options)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        allowance = self._allowance
        if operator == "+":
            if type(left) is str and type(right) is str:  # nearly always
                allowance.left -= len(left) + len(right)
                left += right
                return left if allowance.left >= 0 else allowance.pay(0)
            allowance.pay(_size_without_parts(left) + _size_of(right))  # which becomes part of a list
        elif isinstance(left, int) and isinstance(right, int):
            allowance.pay(left.bit_length() * (abs(right) if operator == "**" else right.bit_length()))
        else:
            allowance.pay(_price_of_call("format" if operator == "%" else "replace", (left, right)))
        return super().call_binop(context, operator, left, right)

    def _paying_filter(self, name: str, made: Callable[..., Any]) -> Callable[..., Any]:
        first = 1 if hasattr(made, "jinja_pass_arg") else 0  # argument that is not Jinja's own

        @functools.wraps(made)
        def paying(*args: Any, **options: Any) -> Any:
            self._allowance.pay(_price_of_call(name, (*args[first:], *options.values())))
            if name in _EACH:
                args = (*args[:first], self._pay_rounds(args[first], _STEP), *args[first + 1 :])
            return made(*args, **options)

        return paying

    def _paying_test(self, test: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
        return lambda value, other: test(self._pay_size(value), self._pay_size(other))

    # --- what `_Counting` writes into a template ---

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        made = _Counting().visit(tree)
        assert isinstance(made, nodes.Template)
        made.set_environment(self)
        return made

    def _pay_rounds(self, values: Any, price: int) -> Any:
        """Return values to go through, each of which costs `price`."""
        if isinstance(values, Sized):
            self._allowance.pay(price * len(values))
            return values
        return self._pay_each_round(values, price)

    def _pay_each_round(self, values: Any, price: int) -> Iterator[Any]:
        for value in values:
            self._allowance.pay(price)
            yield value

    def _pay_size(self, value: Any) -> Any:
        """Return a value that is printed, compared, or put together with others; a number has its bits."""
        allowance = self._allowance
        if type(value) is str:  # nearly always
            allowance.left -= len(value)
        else:
            allowance.left -= value.bit_length() if isinstance(value, int) else _size_of(value)
        return value if allowance.left >= 0 else allowance.pay(0)

    def _pay_copy(self, value: Any) -> Any:
        """Return a value of which a slice is taken."""
        self._allowance.pay(_size_without_parts(value))
        return value


class _Counting(NodeTransformer):
    """Has a template pay for rounds of loops, and for what it puts together, lists, compares or copies."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        price = nodes.Const(_ROUND + _price_of_round([*node.body, *node.else_, *filter(None, [node.test])]))
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _PAY_ROUNDS, price)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_unless_constant(one, _PAY_SIZE) for one in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _unless_constant(node.expr, _PAY_SIZE)
        for operand in node.ops:
            operand.expr = _unless_constant(operand.expr, _PAY_SIZE)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _unless_constant(node.node, _PAY_COPY)
        return node

    def _visit_made(self, node: Any) -> Any:
        self.generic_visit(node)
        return node if _holds_nothing_made(node) else _filtered(node, _PAY_SIZE)

    visit_List = visit_Tuple = visit_Dict = _visit_made


def _filtered(node: Any, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [*arguments], [], None, None, lineno=node.lineno)


def _unless_constant(node: Any, name: str) -> Any:
    return node if isinstance(node, nodes.Const) else _filtered(node, name)


def _holds_nothing_made(node: nodes.Node) -> bool:
    """Return whether a list, or the like, holds constants alone; or is where values go."""
    if getattr(node, "ctx", "load") != "load":
        return True
    return all(isinstance(one, (nodes.Const, nodes.Pair)) for one in node.find_all((nodes.Expr, nodes.Pair)))


def _price_of_round(body: Sequence[nodes.Node]) -> int:
    """Return what a round of a loop costs: parts of its body, and what it prints, without loops in it."""
    price = 0
    for node in body:
        price += _PART + len(str(getattr(node, "data", "")))
        if not isinstance(node, (nodes.For, nodes.Macro)):
            price += _price_of_round([*node.iter_child_nodes()])
    return price


def _price_of_call(name: str, given: Sequence[Any]) -> int:
    """Return what a filter, method or function costs. Raises TemplateError for a width that is too large."""
    if name in _AT_ONCE:
        return _STEP
    if name in _FORMAT and any(isinstance(one, str) and _WIDTH.search(one) for one in given):
        raise jinja2.TemplateError("a width of five digits, or of what is formatted")
    sizes = [len(one) if type(one) is str else _size_of(one) for one in given]
    return _STEP + (math.prod(max(1, n) for n in sizes) if name in _MULTIPLY else sum(sizes))


def _size_of(value: Any, seen: dict[int, int] | None = None) -> int:
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
        of_parts = (_ITEM + (0 if isinstance(one, int) else _size_of(one, seen)) for one in inner)
        seen[id(value)] = _ITEM + sum(of_parts)
    return seen[id(value)]


def _size_without_parts(value: Any) -> int:
    """Return as `_size_of`, of what holds others without them."""
    return _ITEM * len(value) if isinstance(value, (list, tuple)) else _size_of(value)
