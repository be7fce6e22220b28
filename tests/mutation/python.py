"""Changes of a Python module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import accumulate

from tests.mutation.change import Edit

_INSTEAD: dict[type[ast.AST], str] = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.And: "or",
    ast.Or: "and",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
}
#: Calls that only log, or only matter to type checkers.
_SAID = {"debug", "info", "warning", "error", "exception", "critical", "log", "cast"}


def edits(text: str) -> Iterator[Edit]:
    """All possible edits of a module, one by one."""
    module = _Module(text)
    yield from module.of(module.tree)


class _Module:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self._starts = [0, *accumulate(len(line) for line in text.splitlines(keepends=True))]

    def of(self, node: ast.AST) -> Iterator[Edit]:
        if _only_says(node):
            return
        yield from self._of_this(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self.of(child)

    def _of_this(self, node: ast.AST) -> Iterator[Edit]:
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                yield from self._between(left, right, _INSTEAD.get(type(operator)))
            case ast.BoolOp(op=operator, values=[first, second, *_]):
                yield from self._between(first, second, _INSTEAD[type(operator)])
            case ast.BinOp(left=left, op=operator, right=right):
                yield from self._between(left, right, _INSTEAD.get(type(operator)))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield Edit(*self._span(node), f"({self._source(operand)})", "not left out")
            case ast.Constant(value=bool() as value):
                yield Edit(*self._span(node), str(not value), "truth")
            case ast.Constant(value=(int() | float()) as value):
                yield Edit(*self._span(node), f"({value} + 1)", "number")
            case ast.Expr(value=ast.Call()):
                yield Edit(*self._span(node), "pass", "left out")
            case ast.Return(value=ast.AST() as value) if not isinstance(value, ast.Constant):
                yield Edit(*self._span(value), "None", "nothing returned")
            case ast.If(test=test) | ast.While(test=test):
                yield Edit(*self._span(test), f"not ({self._source(test)})", "the other way")
            case ast.Call(args=[ast.expr() as first, ast.expr() as second, *_]):
                if self._source(first) != self._source(second):
                    swapped = f"{self._source(second)}, {self._source(first)}"
                    yield Edit(self._span(first)[0], self._span(second)[1], swapped, "arguments swapped")

    def _between(self, left: ast.AST, right: ast.AST, new: str | None) -> Iterator[Edit]:
        """Replace the operator between two operands, unless there are brackets or comments between them."""
        start, end = self._span(left)[1], self._span(right)[0]
        if new is not None and not set(self.text[start:end]) & set("()#"):
            yield Edit(start, end, f" {new} ", "operator")

    def _source(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.text[start:end]

    def _span(self, node: ast.AST) -> tuple[int, int]:
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def _offset(self, line: int, column: int) -> int:
        """The offset in characters; `column` counts bytes."""
        start = self._starts[line - 1]
        begun = self.text[start:].encode()[:column]
        return start + len(begun.decode())


def _only_says(node: ast.AST) -> bool:
    match node:
        case (
            ast.Expr(value=ast.Constant())
            | ast.Import()
            | ast.ImportFrom()
            | ast.Raise()
            | ast.Assert()
            | ast.JoinedStr()
        ):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.FunctionDef(name="__repr__" | "__str__"):
            return True
        case ast.Call(func=ast.Attribute(attr=name)) | ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))):
            return name in _SAID
        case ast.Call(func=ast.Name(id=name)):
            return name in _SAID
    return False
