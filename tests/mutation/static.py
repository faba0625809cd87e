"""What `make check` would say of a removal, without running anything.

Only what the linter or the type checker is sure to report: a name, an attribute or a member of an enumeration
that nothing else binds and that is still read, and a function that no longer returns what it says. None of
that can be committed.
"""

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from tests.mutation.statements import CORE, Statement

ENUMERATIONS = {"Enum", "IntEnum", "StrEnum"}


@lru_cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


def undefined(statement: Statement) -> str | None:
    """What is missing without a statement, if that can be told from the text."""
    path = list(_path_to(_tree(statement.path), statement))
    node, around = path[-1], path[-2]
    function = next((each for each in reversed(path) if isinstance(each, ast.FunctionDef)), None)
    if isinstance(node, ast.Return):
        last = node.value is not None and isinstance(around, ast.FunctionDef) and around.body[-1] is node
        return "missing return" if last else None
    if not isinstance(node, (ast.Assign, ast.AnnAssign)):
        return None
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    if function is None:
        scope: ast.AST | None = None if any(isinstance(each, ast.ClassDef) for each in path) else path[0]
    else:
        scope = function
    if scope is not None and any(_sole_binding(name, scope) for name in _names(targets)):
        return "undefined name"
    kind = next((each for each in reversed(path) if isinstance(each, ast.ClassDef)), None)
    if kind is around and any(_is_read_member(name, kind) for name in _names(targets)):
        return "undefined member"
    if kind is not None and function is not None and function.name == "__init__":
        attributes = [target.attr for target in targets if isinstance(target, ast.Attribute)]
        if any(_sole_attribute(name, kind) for name in attributes):
            return "undefined attribute"
    return None


def _path_to(node: ast.AST, statement: Statement) -> Iterator[ast.AST]:
    """The nodes from a module down to a statement."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            first, last = _lines(child)
            if first <= statement.line <= last and statement.is_in(child):
                yield from _path_to(child, statement)
                return


def _lines(node: ast.stmt | ast.ExceptHandler | ast.match_case) -> tuple[int, int]:
    if isinstance(node, ast.match_case):
        return node.pattern.lineno, node.body[-1].end_lineno or 0
    return node.lineno, node.end_lineno or 0


def _names(targets: list[ast.expr]) -> list[str]:
    """The names that an assignment binds."""
    parts = [part for target in targets for part in ast.walk(target)]
    return [part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)]


def _sole_binding(name: str, scope: ast.AST) -> bool:
    """Whether a name is bound once in a module or function, and read there."""
    uses = [each for each in ast.walk(scope) if isinstance(each, ast.Name) and each.id == name]
    others = [each for each in ast.walk(scope) if isinstance(each, ast.arg) and each.arg == name]
    stores = [each for each in uses if isinstance(each.ctx, ast.Store)]
    return len(stores) == 1 and not others and len(uses) > 1


def _sole_attribute(name: str, kind: ast.ClassDef) -> bool:
    """Whether an attribute of `self` is set once in a class, not declared, and read there."""
    if any(isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == name for each in kind.body):
        return False
    uses = [
        each
        for each in ast.walk(kind)
        if isinstance(each, ast.Attribute) and each.attr == name and ast.unparse(each.value) == "self"
    ]
    stores = [each for each in uses if isinstance(each.ctx, ast.Store)]
    return len(stores) == 1 and len(uses) > 1


def _is_read_member(name: str, kind: ast.ClassDef) -> bool:
    """Whether a name is a member of an enumeration that the core reads by its name."""
    bases = {base.id for base in kind.bases if isinstance(base, ast.Name)}
    return bool(bases & ENUMERATIONS) and f"{kind.name}.{name}" in _attributes_of_names()


@lru_cache
def _attributes_of_names() -> frozenset[str]:
    """Everything in the core that has the form `Name.attribute`."""
    nodes = [node for path in CORE.glob("*.py") for node in ast.walk(_tree(path))]
    read = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    return frozenset(ast.unparse(node) for node in read)
