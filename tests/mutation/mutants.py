"""Mutants of rule code: one small change each to the syntax tree of a module.

What is changed: comparisons, ``and``/``or``, ``not``, conditions, numbers and truth values inside functions, signs, set
operations, ``min``/``max``, members of our enums, and statements that keep or pass on state (calls, assignments to
attributes and items, ``continue``, ``break``, early ``return``), which are removed. What is not: texts, type
annotations and unions, limits of tables, how a class is made (``frozen``, ``eq``), assertions and ``raise``;
assignments to plain names, whose removal cannot be missed.
"""

from __future__ import annotations

import ast
import enum
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hicache_obs import findings, records

ENUMS = {
    name: list(kind.__members__)
    for module in (findings, records)
    for name, kind in vars(module).items()
    if isinstance(kind, enum.EnumMeta) and len(kind) > 1
}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "maximum": "minimum", "minimum": "maximum"}
SKIPPED = (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)


Path = tuple[tuple[str, int | None], ...]
"""Fields and positions from the module to a node."""


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        key: Names it as long as its function keeps the line: a hash of module, function, line and change.
        module: Dotted name of the module.
        line: In the file.
        function: Qualified name, ``<module>`` outside of functions.
        change: What is done, in words.
        source: Text of the module.
        path, number: Where the node is, and which of its changes this is.
    """

    key: str
    module: str
    line: int
    function: str
    change: str
    source: str
    path: Path
    number: int

    def tree(self) -> ast.Module:
        """The whole changed module."""
        tree = ast.parse(self.source)
        replacement = _changes(_at(tree, self.path), self.function)[self.number][1]()
        if replacement is not None:
            _put(tree, self.path, replacement)
        return ast.fix_missing_locations(tree)

    def lines(self) -> tuple[str, str]:
        """The first line of its statement, before and after."""
        before, after = ast.parse(self.source), self.tree()
        path = self.path
        while not isinstance(_at(before, path), ast.stmt):
            path = path[:-1]
        first, second = (ast.unparse(_at(tree, path)).splitlines() for tree in (before, after))
        changed = next((index for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), 0)
        return first[changed].strip(), second[min(changed, len(second) - 1)].strip()


def mutants(module: str, source: str) -> Iterator[Mutant]:
    """Every mutant of a module, in the order of the file."""
    tree = ast.parse(source)
    lines = source.splitlines()
    seen: Counter[str] = Counter()
    for path, function, node, line in _places(tree, (), "<module>", 1):
        for number, (change, _) in enumerate(_changes(node, function)):
            text = "\0".join((module, function, lines[line - 1].strip(), change))
            seen[text] += 1
            key = hashlib.sha256(f"{text}\0{seen[text]}".encode()).hexdigest()[:12]
            yield Mutant(key, module, line, function, change, source, path, number)


def _places(node: ast.AST, path: Path, function: str, line: int) -> Iterator[tuple[Path, str, ast.AST, int]]:
    """Nodes that may be changed, with their function and line."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        if name == "keywords" and isinstance(node, ast.ClassDef):
            continue
        for position, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or isinstance(child, SKIPPED) or _docstring(child):
                continue
            inner = function
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = child.name if function == "<module>" else f"{function}.{child.name}"
            here, at = (*path, (name, position)), getattr(child, "lineno", line)
            yield here, inner, child, at
            yield from _places(child, here, inner, at)


def _docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _at(tree: ast.AST, path: Path) -> Any:
    for name, position in path:
        found = getattr(tree, name)
        tree = found if position is None else found[position]
    return tree


def _put(tree: ast.AST, path: Path, node: ast.AST) -> None:
    name, position = path[-1]
    owner = _at(tree, path[:-1])
    if position is None:
        setattr(owner, name, node)
    else:
        getattr(owner, name)[position] = node


def _changes(node: Any, function: str) -> list[tuple[str, Any]]:
    """Changes that a node allows: what each is, and a function that does it, returning a new node or changing it."""
    found: list[tuple[str, Any]] = []
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            other = COMPARISONS[type(operator)]
            found.append(
                (f"comparison {index} to {other.__name__}", lambda i=index, o=other: node.ops.__setitem__(i, o()))
            )
    elif isinstance(node, ast.BoolOp):
        other_bool = ast.Or if isinstance(node.op, ast.And) else ast.And
        found.append((f"to {other_bool.__name__}", lambda: setattr(node, "op", other_bool())))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        found.append(("not removed", lambda: node.operand))
    elif isinstance(node, ast.BinOp) and function == "<module>" and _limit_or_union(node):
        pass
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATORS:
        changed = OPERATORS[type(node.op)]
        found.append((f"to {changed.__name__}", lambda: setattr(node, "op", changed())))
    elif isinstance(node, ast.Constant) and function != "<module>":
        if isinstance(node.value, bool):
            found.append((f"to {not node.value}", lambda: ast.Constant(not node.value)))
        elif isinstance(node.value, int):
            found.append((f"{node.value} to {node.value + 1}", lambda: ast.Constant(node.value + 1)))
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ENUMS:
        members = ENUMS[node.value.id]
        if node.attr in members:
            swapped = members[(members.index(node.attr) + 1) % len(members)]
            found.append((f"{node.attr} to {swapped}", lambda: setattr(node, "attr", swapped)))
    elif isinstance(node, ast.Name) and node.id in NAMES:
        found.append((f"{node.id} to {NAMES[node.id]}", lambda: setattr(node, "id", NAMES[node.id])))
    elif isinstance(node, ast.Attribute) and node.attr in NAMES:
        found.append((f"{node.attr} to {NAMES[node.attr]}", lambda: setattr(node, "attr", NAMES[node.attr])))
    if not (
        function.endswith(".__init__") and isinstance(node, ast.Assign)
    ):  # what is not there at all is missed at once
        found += _statement_changes(node)
    test = getattr(node, "test", None)
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not _mutated_itself(test):
        found.append(("condition negated", lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))))
    if isinstance(node, ast.comprehension):
        for index, condition in enumerate(node.ifs):
            if not _mutated_itself(condition):
                found.append(
                    (
                        f"filter {index} negated",
                        lambda i=index: node.ifs.__setitem__(i, ast.UnaryOp(ast.Not(), node.ifs[i])),
                    )
                )
    return found


def _limit_or_union(node: ast.BinOp) -> bool:
    """``1 << 14``, or a union of types."""
    return isinstance(node.op, ast.LShift | ast.BitOr) and all(
        isinstance(part, ast.Name | ast.Constant) or (isinstance(part, ast.BinOp) and _limit_or_union(part))
        for part in (node.left, node.right)
    )


def _mutated_itself(test: ast.AST | None) -> bool:
    return isinstance(test, ast.BoolOp | ast.Compare) or (
        isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    )


def _statement_changes(node: Any) -> list[tuple[str, Any]]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Yield | ast.YieldFrom):
        return [("removed", ast.Pass)] if isinstance(node.value, ast.Call) else []
    if isinstance(node, ast.Assign) and all(
        isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets
    ):
        return [("removed", ast.Pass)]
    if isinstance(node, ast.AugAssign | ast.Continue | ast.Break | ast.Delete):
        return [("removed", ast.Pass)]
    if isinstance(node, ast.Return) and node.value is None:
        return [("removed", ast.Pass)]
    return []
