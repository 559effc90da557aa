"""The Jinja environment of chat templates, which may come from untrusted models.

Jinja's sandbox rejects unsafe calls. This one also limits time and memory, because a template of a few bytes
can run for hours or fill the memory. Each chat has an allowance in characters. The template pays

- for values that it concatenates, prints, lists, compares or copies: their size (`_size_of`);
- for an iteration of a loop: the characters that take as long (`_iteration_cost`);
- for a call of a filter, method or function: the sizes of its arguments, or their product if the result may
  have that size (`_call_cost`).

The environment intercepts calls and arithmetic. For the other operations, `_CostInserter` inserts filters
into a template before Jinja compiles it.
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

# The allowance of a chat: a constant, and more for each character and message.
_ANY_CHAT = 1 << 26
_FOR_A_CHARACTER = 64
_PASSES_FOR_A_MESSAGE = 8  # through the complete template

# Costs, in characters that take as long: a call; an iteration of a loop, and each node of its body; an item
# of a list or mapping.
_CALL, _ITERATION, _NODE, _ITEM = 256, 64, 8, 32
_MACRO_CALLS, _MESSAGE_CALLS = 12, 16

# Filters and methods whose result may have the product of the arguments' sizes, or a width from an argument.
_MULTIPLY = frozenset(
    {
        *("batch", "center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "replace"),
        *("rjust", "slice", "tojson", "translate", "wordwrap", "xmlattr", "zfill"),
    }
)
_FORMAT = ("format", "format_map")
_WIDTH = re.compile(r"\d{5}|%[^a-zA-Z%]*\*")  # in a format string
_CONSTANT_TIME = ("count", "d", "default", "first", "last", "length")  # filters
_EACH = ("map", "reject", "rejectattr", "select", "selectattr")  # filters that call others, or tests
_COMPARE = (
    *("!=", "<", "<=", "==", ">", ">=", "in"),
    *("eq", "equalto", "ge", "greaterthan", "gt", "le", "lessthan", "lt", "ne"),
)
# The filters that `_CostInserter` inserts into templates.
_PAY_ITERATIONS, _PAY_SIZE, _PAY_COPY = "mpillm iterations", "mpillm size", "mpillm copy"


class _Allowance(threading.local):
    """Remaining characters for the chat that a thread renders."""

    left = 0

    def pay(self, n: int) -> None:
        """Subtract `n` characters. Raises TemplateError if fewer remain."""
        self.left -= n
        if self.left < 0:
            raise jinja2.TemplateError("it takes too long, or too much memory")


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox that raises TemplateError if a template takes too much time or memory."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self._pay_size, **options)
        self._allowance = _Allowance()
        self._template_cost = 0  # of one pass through the template
        self.globals.pop("lipsum")

    def add_costs(self) -> None:
        """Add costs to filters and tests, after all of them are registered."""
        self.filters.update({name: self._paying_filter(name, plain) for name, plain in self.filters.items()})
        tests: dict[str, Any] = self.tests
        tests.update({name: self._paying_test(tests[name]) for name in _COMPARE})
        added = {_PAY_ITERATIONS: self._pay_iterations, _PAY_SIZE: self._pay_size, _PAY_COPY: self._pay_copy}
        self.filters.update(added)

    def begin(self, template: str, messages: Sequence[Mapping[str, Any]] = ()) -> None:
        """Set the allowance to compile the template, or for a chat."""
        self._template_cost = _CALL + len(template)
        n_characters = sum(len(str(message.get("content"))) for message in messages)
        for_a_message = _PASSES_FOR_A_MESSAGE * (self._template_cost + _MESSAGE_CALLS * _CALL)
        self._allowance.left = _ANY_CHAT + _FOR_A_CHARACTER * n_characters + for_a_message * len(messages)

    # --- operations that Jinja passes to the environment ---

    def call(self, context: Any, called: Any, *args: Any, **options: Any) -> Any:
        if isinstance(called, (runtime.Macro, runtime.LoopContext)):
            self._allowance.pay(self._template_cost + _MACRO_CALLS * _CALL)
        if isinstance(called, runtime.LoopContext) and args:
            args = (self._pay_iterations(args[0], self._template_cost), *args[1:])
        values = [*args, *options.values()]
        method = getattr(called, "__wrapped__", called)  # the sandbox wraps str.format in a function
        if isinstance(owner := getattr(method, "__self__", None), (str, list, tuple)):
            values.append(owner)
        self._allowance.pay(_call_cost(getattr(called, "__name__", ""), values))
        return super().call(context, called, *args, **options)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        allowance = self._allowance
        if operator == "+":
            if type(left) is str and type(right) is str:  # nearly always
                allowance.left -= len(left) + len(right)
                left += right
                return left if allowance.left >= 0 else allowance.pay(0)
            allowance.pay(_size_without_parts(left) + _size_of(right))  # `right` may become part of a list
        elif isinstance(left, int) and isinstance(right, int):
            allowance.pay(left.bit_length() * (abs(right) if operator == "**" else right.bit_length()))
        else:
            allowance.pay(_call_cost("format" if operator == "%" else "replace", (left, right)))
        return super().call_binop(context, operator, left, right)

    def _paying_filter(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        first = 1 if hasattr(plain, "jinja_pass_arg") else 0  # argument after Jinja's own

        @functools.wraps(plain)
        def paying(*args: Any, **options: Any) -> Any:
            self._allowance.pay(_call_cost(name, (*args[first:], *options.values())))
            if name in _EACH:
                args = (*args[:first], self._pay_iterations(args[first], _CALL), *args[first + 1 :])
            return plain(*args, **options)

        return paying

    def _paying_test(self, test: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
        return lambda value, other: test(self._pay_size(value), self._pay_size(other))

    # --- filters that `_CostInserter` inserts into a template ---

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        changed = _CostInserter().visit(tree)
        assert isinstance(changed, nodes.Template)
        changed.set_environment(self)
        return changed

    def _pay_iterations(self, values: Any, cost: int) -> Any:
        """Return the values of a loop, and pay `cost` for each."""
        if isinstance(values, Sized):
            self._allowance.pay(cost * len(values))
            return values
        return self._pay_each_iteration(values, cost)

    def _pay_each_iteration(self, values: Any, cost: int) -> Iterator[Any]:
        for value in values:
            self._allowance.pay(cost)
            yield value

    def _pay_size(self, value: Any) -> Any:
        """Return a value that is printed, compared or concatenated. The size of a number is its bits."""
        allowance = self._allowance
        if type(value) is str:  # nearly always
            allowance.left -= len(value)
        else:
            allowance.left -= value.bit_length() if isinstance(value, int) else _size_of(value)
        return value if allowance.left >= 0 else allowance.pay(0)

    def _pay_copy(self, value: Any) -> Any:
        """Return a value before it is sliced."""
        self._allowance.pay(_size_without_parts(value))
        return value


class _CostInserter(NodeTransformer):
    """Inserts costs for loops, and for values that a template concatenates, lists, compares or copies."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        cost = nodes.Const(
            _ITERATION + _iteration_cost([*node.body, *node.else_, *filter(None, [node.test])])
        )
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _PAY_ITERATIONS, cost)
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

    def _visit_container(self, node: Any) -> Any:
        self.generic_visit(node)
        return node if _is_constant_or_target(node) else _filtered(node, _PAY_SIZE)

    visit_List = visit_Tuple = visit_Dict = _visit_container


def _filtered(node: Any, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [*arguments], [], None, None, lineno=node.lineno)


def _unless_constant(node: Any, name: str) -> Any:
    return node if isinstance(node, nodes.Const) else _filtered(node, name)


def _is_constant_or_target(node: nodes.Node) -> bool:
    """Return whether a list, tuple or dict has only constants, or is the target of an assignment."""
    if getattr(node, "ctx", "load") != "load":
        return True
    return all(isinstance(one, (nodes.Const, nodes.Pair)) for one in node.find_all((nodes.Expr, nodes.Pair)))


def _iteration_cost(body: Sequence[nodes.Node]) -> int:
    """Return the cost of an iteration: the nodes and text of its body, without inner loops."""
    cost = 0
    for node in body:
        cost += _NODE + len(str(getattr(node, "data", "")))
        if not isinstance(node, (nodes.For, nodes.Macro)):
            cost += _iteration_cost([*node.iter_child_nodes()])
    return cost


def _call_cost(name: str, args: Sequence[Any]) -> int:
    """Return the cost of a filter, method or function. Raises TemplateError for a width that is too large."""
    if name in _CONSTANT_TIME:
        return _CALL
    if name in _FORMAT and any(isinstance(one, str) and _WIDTH.search(one) for one in args):
        raise jinja2.TemplateError("a width of five digits, or of what is formatted")
    sizes = [len(one) if type(one) is str else _size_of(one) for one in args]
    return _CALL + (math.prod(max(1, n) for n in sizes) if name in _MULTIPLY else sum(sizes))


def _size_of(value: Any, seen: dict[int, int] | None = None) -> int:
    """Return the number of characters of a printed value, or its items; for a number, its absolute value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int):
        return min(abs(value), 1 << 40)
    if isinstance(value, range):
        return _CALL * len(value)
    if not isinstance(value, (list, tuple, Mapping)):
        return 1
    seen = {} if seen is None else seen
    if id(value) not in seen:  # nested lists may contain one list exponentially often
        seen[id(value)] = 0
        inner = (*value.keys(), *value.values()) if isinstance(value, Mapping) else value
        of_parts = (_ITEM + (0 if isinstance(one, int) else _size_of(one, seen)) for one in inner)
        seen[id(value)] = _ITEM + sum(of_parts)
    return seen[id(value)]


def _size_without_parts(value: Any) -> int:
    """Return `_size_of`, but count an item of a list or tuple as a constant."""
    return _ITEM * len(value) if isinstance(value, (list, tuple)) else _size_of(value)
