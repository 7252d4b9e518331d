"""Figures that carry their formula.

A formula is text, evaluated over names: what is printed is what was computed. Allowed are numbers,
names, + - * / // % **, comparisons, `a if b else c`, and min, max, ceil, floor. A division of
integers without remainder stays an integer, so that counts and bytes stay exact.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Number = int | float

_FUNCTIONS = {"min": min, "max": max, "ceil": math.ceil, "floor": math.floor}


@dataclass(frozen=True)
class Figure:
    """A number with its origin.

    Attributes:
        name: how other formulas call it.
        value: exact where the formula is.
        unit: `elements`, `B`, `FLOP`, `ms`, ... Bytes are `B`; GB and GiB are made when shown.
        title: what it is, for people.
        formula: over names of the sheet. inputs: the values of the names in it.
        source: the config key, file of SGLang or measurement that the formula rests on.
    """

    name: str
    value: Number
    unit: str
    title: str
    formula: str
    inputs: Mapping[str, Number]
    source: str

    @property
    def numbers(self) -> str:
        """The formula with the numbers in the names' places."""
        return substitute(self.formula, self.inputs)


class Sheet(Mapping[str, Number]):
    """Names and figures; a figure's formula may use whatever was put in before it."""

    def __init__(self, names: Mapping[str, Number], parent: Sheet | None = None) -> None:
        self._names: dict[str, Number] = dict(parent or {})
        self._names.update(names)
        self.figures: dict[str, Figure] = {}

    def __getitem__(self, name: str) -> Number:
        return self._names[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def add(
        self, name: str, formula: str, unit: str = "", title: str = "", source: str = ""
    ) -> Figure:
        """Evaluate `formula`, remember it under `name`, and return the figure."""
        figure = self.figure(name, formula, unit, title, source)
        self._names[name] = figure.value
        self.figures[name] = figure
        return figure

    def figure(
        self, name: str, formula: str, unit: str = "", title: str = "", source: str = ""
    ) -> Figure:
        """The figure of `formula`, without remembering it."""
        formula = " ".join(formula.split())
        return Figure(
            name,
            evaluate(formula, self._names),
            unit,
            title or name.replace("_", " "),
            formula,
            {name: self._names[name] for name in used_names(formula)},
            source,
        )


def evaluate(formula: str, names: Mapping[str, Number]) -> Number:
    """The value of `formula`.

    Raises:
        KeyError: a name that is not there.
        ValueError: anything but arithmetic.
    """
    return _value(_parse(formula), names)


def substitute(formula: str, names: Mapping[str, Number]) -> str:
    """`formula` with each name's number in its place."""

    class Numbers(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            return node if node.id in _FUNCTIONS else ast.Constant(_short(names[node.id]))

        def visit_Call(self, node: ast.Call) -> ast.AST:
            return ast.Call(node.func, [self.visit(each) for each in node.args], [])

    return ast.unparse(Numbers().visit(ast.parse(formula, mode="eval").body))


def _short(value: Number) -> Number:
    return value if isinstance(value, int) else float(f"{value:.14g}")


@functools.lru_cache(maxsize=4096)
def used_names(formula: str) -> tuple[str, ...]:
    """The names that stand in `formula`."""
    found = (node.id for node in ast.walk(_parse(formula)) if isinstance(node, ast.Name))
    return tuple(dict.fromkeys(name for name in found if name not in _FUNCTIONS))


@functools.lru_cache(maxsize=4096)
def _parse(formula: str) -> ast.expr:
    return ast.parse(formula, mode="eval").body


def _value(node: ast.expr, names: Mapping[str, Number]) -> Number:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.Name):
        return names[node.id]
    if isinstance(node, ast.BinOp):
        return _binary(node.op, _value(node.left, names), _value(node.right, names))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, names)
    if isinstance(node, ast.IfExp):
        return _value(node.body if _value(node.test, names) else node.orelse, names)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _compare(node.ops[0], _value(node.left, names), _value(node.comparators[0], names))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id in _FUNCTIONS:
            return _FUNCTIONS[node.func.id](*(_value(each, names) for each in node.args))
    raise ValueError(f"not arithmetic: {ast.unparse(node)}")


def _binary(operation: ast.operator, left: Number, right: Number) -> Number:
    match operation:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.FloorDiv():
            return left // right
        case ast.Mod():
            return left % right
        case ast.Pow():
            return left**right
        case ast.Div():
            whole = isinstance(left, int) and isinstance(right, int) and left % right == 0
            return left // right if whole else left / right
    raise ValueError(f"not arithmetic: {type(operation).__name__}")


def _compare(operation: ast.cmpop, left: Number, right: Number) -> bool:
    match operation:
        case ast.Gt():
            return left > right
        case ast.GtE():
            return left >= right
        case ast.Lt():
            return left < right
        case ast.LtE():
            return left <= right
        case ast.Eq():
            return left == right
    raise ValueError(f"not a comparison of numbers: {type(operation).__name__}")
