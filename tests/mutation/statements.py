"""The statements of the core, and the core without one of them.

A `Statement` is a simple statement that can be removed: an assignment, a call, a return, a raise, a continue,
a break, a del. Docstrings, assertions, imports, `pass`, bare annotations and declarations without behaviour
(`__slots__`, `__all__`) are not. Where one is removed, `pass` stands, so the rest keeps its lines.

Most statements are inside a function. Such a removal is put into the loaded module by exchanging the code of
the function (`exchange`). The others need a process that has not imported the core (`FreshModule`).
"""

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

ROOT = Path(__file__).parents[2]
CORE = ROOT / "src" / "holdfast" / "core"
REMOVABLE = (
    ast.Assign,
    ast.AugAssign,
    ast.AnnAssign,
    ast.Expr,
    ast.Return,
    ast.Raise,
    ast.Continue,
    ast.Break,
    ast.Delete,
)
DECLARATIONS = {"__slots__", "__all__"}


@dataclass(frozen=True)
class Statement:
    """One statement: where it is, what it says, and the how-manieth of its function says that."""

    file: str
    function: str
    text: str
    occurrence: int
    line: int
    end_line: int
    column: int
    in_function: bool

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What names a statement, wherever its file's other lines move."""
        return self.file, self.function, self.text, self.occurrence

    @property
    def path(self) -> Path:
        """Its file."""
        return CORE / self.file

    @property
    def module(self) -> str:
        """The module that it is in."""
        return f"holdfast.core.{self.path.stem}"

    @cached_property
    def code(self) -> CodeType:
        """Its module without it."""
        tree = ast.parse(self.path.read_bytes())
        return compile(_Without(self).visit(tree), str(self.path), "exec")

    def is_in(self, node: ast.AST) -> bool:
        """Whether it is this node, or below it."""
        if isinstance(node, REMOVABLE):
            return _is(node, self)
        return any(isinstance(each, REMOVABLE) and _is(each, self) for each in ast.walk(node))

    def __str__(self) -> str:
        return f"core/{self.file}:{self.line}: {self.text}"


class _Without(ast.NodeTransformer):
    """Puts `pass` in the place of one statement."""

    def __init__(self, statement: Statement) -> None:
        self.statement = statement

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.stmt) and _is(node, self.statement):
            return ast.copy_location(ast.Pass(), node)
        return super().visit(node)


def _is(node: ast.stmt, statement: Statement) -> bool:
    return (node.lineno, node.col_offset) == (statement.line, statement.column) and isinstance(
        node, REMOVABLE
    )


def _bound(node: ast.stmt) -> set[str]:
    """The names that a statement binds."""
    stored = [n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return {name.id for name in stored}


def statements(path: Path) -> list[Statement]:
    """Everything that can be removed from one file of the core, in order."""
    found: list[Statement] = []
    counts: dict[tuple[str, str], int] = {}
    for node, function, in_function in _removable(ast.parse(path.read_bytes()), "", False):
        text = " ".join(ast.unparse(node).split())
        number = counts[function, text] = counts.get((function, text), 0) + 1
        end = node.end_lineno or node.lineno
        found.append(
            Statement(path.name, function, text, number, node.lineno, end, node.col_offset, in_function)
        )
    return found


def _removable(node: ast.AST, inside: str, in_function: bool) -> Iterator[tuple[ast.stmt, str, bool]]:
    """The removable statements below a node, with the function or class that each is in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            name = f"{inside}.{child.name}" if inside else child.name
            yield from _removable(child, name, in_function or isinstance(child, ast.FunctionDef))
        elif isinstance(child, REMOVABLE):
            if not _says_nothing(child):
                yield child, inside, in_function
        elif isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield from _removable(child, inside, in_function)


def _says_nothing(node: ast.stmt) -> bool:
    """Docstrings, bare annotations, and declarations."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return True
    return bool(_bound(node) & DECLARATIONS)


# --- in a process that has imported the core ---------------------------------------------------------------


def exchange(statement: Statement) -> bool:
    """Remove a statement from the module as it is loaded; False if only importing it anew would do."""
    if not statement.in_function:
        return False
    module = sys.modules[statement.module]
    for function in _functions(module):
        code = function.__code__
        if code.co_firstlineno <= statement.line <= _last_line(code):
            without = _find(statement.code, code.co_qualname, code.co_firstlineno)
            if without.co_freevars != code.co_freevars:
                return False
            function.__code__ = without
            return True
    return False


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """The functions that a module defines, those of its classes included, decorated or not."""
    pending: list[object] = list(vars(module).values())
    while pending:
        thing = pending.pop()
        if isinstance(thing, property):
            pending += [thing.fget, thing.fset]
        elif isinstance(thing, (staticmethod, classmethod)):
            pending.append(thing.__func__)
        elif isinstance(thing, type) and thing.__module__ == module.__name__:
            pending += vars(thing).values()
        elif isinstance(thing, FunctionType):
            if thing.__code__.co_filename == module.__file__:
                yield thing
            elif "__wrapped__" in vars(thing):
                pending.append(vars(thing)["__wrapped__"])


def _last_line(code: CodeType) -> int:
    lines = [line for _, _, line in code.co_lines() if line is not None]
    return max([*lines, *(_last_line(part) for part in code.co_consts if isinstance(part, CodeType))])


def _find(code: CodeType, name: str, line: int) -> CodeType:
    """The code of a function inside a module's."""
    parts = [part for part in code.co_consts if isinstance(part, CodeType)]
    for part in parts:
        if part.co_firstlineno == line and part.co_qualname == name:
            return part
    around = [part for part in parts if part.co_firstlineno <= line <= _last_line(part)]
    return _find(around[-1], name, line)


# --- in a process that has not imported it -----------------------------------------------------------------


class FreshModule(MetaPathFinder):
    """Lets the next import of a statement's module find it without the statement."""

    def __init__(self, statement: Statement) -> None:
        self.statement = statement

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """How the module without its statement is loaded; other modules are left to others."""
        if fullname != self.statement.module:
            return None
        loader = _Loader(fullname, str(self.statement.path), self.statement.code)
        return spec_from_file_location(fullname, str(self.statement.path), loader=loader)


class _Loader(SourceFileLoader):
    """Loads a module from code that is there already."""

    def __init__(self, fullname: str, path: str, code: CodeType) -> None:
        super().__init__(fullname, path)
        self.code = code

    def get_code(self, fullname: str) -> CodeType:
        return self.code
