"""The rules of the house as functions from the text of a file to its offences.

Owns what is forbidden and why; test_repository.py applies the rules to the tree, test_rules.py shows that
each of them can fail. A rule reads nothing but the Source that it is given, so a test can feed it a snippet.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tests.tidy.imports import (
    CORE_DENIED,
    CORE_DENIED_BUILTINS,
    ENVIRONMENT_READERS,
    MAY_IMPORT,
    PACKAGE,
    PURE,
    THIRD_PARTY_DENIED,
    Source,
    dotted_name,
    imported_modules,
    name_matches,
)


class Offence(NamedTuple):
    """Where a rule is broken and what is wrong there; prints as `file:line: what`."""

    path: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


Rule = Callable[[Source], Iterator[Offence]]

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 90
PARAMETERS_MAX = 9

# Loading any of these runs code that the file brings along.
CODE_RUNNING_MODULES = {
    "pickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "jsonpickle",
}
CODE_RUNNING_BUILTINS = {"eval", "exec", "compile", "__import__"}
CODE_RUNNING_FUNCTIONS = {"torch.load", "builtins.eval", "builtins.exec"}
CODE_RUNNING_SWITCHES = {"trust_remote_code", "allow_pickle"}

# What an assertion may call: queries by convention. `python -O` removes an assertion and every call in it.
CALLS_WITHOUT_EFFECT = {
    *("abs", "all", "any", "array", "bool", "dict", "enumerate", "float", "int", "isinstance", "issubclass"),
    *("len", "list", "max", "min", "range", "repr", "reversed", "round", "set", "sorted", "str", "sum"),
    *("tuple", "type", "zip"),
    *("bit_length", "count", "endswith", "index", "isdisjoint", "issubset", "items", "keys", "startswith"),
    *("dim", "element_size", "is_contiguous", "is_floating_point", "numel", "size", "stride", "values"),
    # Of this project, and of a tokenizer.
    *("is_alone_in", "queue_lines", "tile_tokens", "token_to_id"),
}

# Written with brackets, so that this file does not break the rule that it states.
UNFINISHED = re.compile(r"\b(?:[T]ODO|[F]IXME|[X]XX|[H]ACK)\b")
COVERAGE_EXCUSE = re.compile(r"pragma:\s*no\s+(?:cover|branch)", re.IGNORECASE)
MACHINE_PATH = re.compile(r"(?<![\w.~)}\]>*-])/(?:work|root|home|Users|opt)/[\w.]")


def imports_run_downwards(source: Source) -> Iterator[Offence]:
    """Imports run downwards: cli -> bench -> server -> engine -> (models -> kernels), core."""
    package = source.package
    if package not in MAY_IMPORT:
        yield Offence(source.path, 1, f"{package} is not a package of the house")
        return
    for line, module in imported_modules(source.nodes):
        if module.startswith("."):
            yield Offence(source.path, line, f"relative import of {module}")
        elif name_matches(module, {PACKAGE}):
            target = _package_of(module)
            if target != package and target not in MAY_IMPORT[package]:
                yield Offence(source.path, line, f"{package or PACKAGE} must not import {target}")


def third_party_stays_in_its_place(source: Source) -> Iterator[Offence]:
    """Web packages stay out of what runs on a GPU machine, torch out of simulation and client."""
    for room, denied in THIRD_PARTY_DENIED.items():
        if not f"{source.module}.".startswith(f"{PACKAGE}.{room}."):
            continue
        for line, module in imported_modules(source.nodes):
            if name_matches(module, denied):
                yield Offence(source.path, line, f"{room} must not import {module}")


def core_is_pure(source: Source) -> Iterator[Offence]:
    """Core and cluster import the standard library alone, less what reaches for the world, and do no I/O."""
    package = source.package
    if package not in PURE:
        return
    for line, module in imported_modules(source.nodes):
        if name_matches(module, {PACKAGE}):
            if not module.startswith(f"{PACKAGE}.{package}"):
                yield Offence(source.path, line, f"the {package} must not import {module}")
        elif name_matches(module, CORE_DENIED) or not name_matches(module, sys.stdlib_module_names):
            yield Offence(source.path, line, f"the {package} must not import {module}")
    for node in source.nodes:
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in CORE_DENIED_BUILTINS:
                yield Offence(source.path, node.lineno, f"the {package} must not call {name}")


def no_code_running_loaders(source: Source) -> Iterator[Offence]:
    """No pickle and its kin, no eval, no torch.load: data never becomes code."""
    for line, module in imported_modules(source.nodes):
        if name_matches(module, CODE_RUNNING_MODULES) or module in CODE_RUNNING_FUNCTIONS:
            yield Offence(source.path, line, f"imports {module}, which can run code from data")
    for node in source.nodes:
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in CODE_RUNNING_BUILTINS:
                yield Offence(source.path, node.lineno, f"calls {name}")
            case ast.Attribute() if dotted_name(node) in CODE_RUNNING_FUNCTIONS:
                yield Offence(source.path, node.lineno, f"uses {dotted_name(node)}")
            case ast.keyword(arg=str(name), value=value) if name in CODE_RUNNING_SWITCHES:
                if not (isinstance(value, ast.Constant) and value.value is False):
                    yield Offence(source.path, value.lineno, f"passes {name}")


def file_is_short(source: Source) -> Iterator[Offence]:
    """A file has at most 600 lines; 400 is the aim."""
    lines = len(source.text.splitlines())
    if lines > FILE_LINES_MAX:
        yield Offence(source.path, lines, f"{lines} lines, at most {FILE_LINES_MAX}")


def functions_are_short(source: Source) -> Iterator[Offence]:
    """A function has at most 90 lines, from its def to its end; 70 is the aim."""
    for function in _functions(source):
        assert function.end_lineno is not None
        lines = function.end_lineno - function.lineno + 1
        if lines > FUNCTION_LINES_MAX:
            what = f"{function.name} has {lines} lines, at most {FUNCTION_LINES_MAX}"
            yield Offence(source.path, function.lineno, what)


def functions_take_few_parameters(source: Source) -> Iterator[Offence]:
    """A function takes at most nine parameters besides self.

    Two kinds are left out, because their parameters are not a matter of design: in `cli` each option of a
    command is a parameter, and a Triton kernel takes each pointer and stride on its own.
    """
    if source.module.startswith(f"{PACKAGE}.cli"):
        return
    for function in _functions(source):
        if any(_is_triton_jit(decorator) for decorator in function.decorator_list):
            continue
        arguments = function.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        count = sum(argument.arg not in {"self", "cls"} for argument in named)
        if count > PARAMETERS_MAX:
            what = f"{function.name} takes {count} parameters, at most {PARAMETERS_MAX}"
            yield Offence(source.path, function.lineno, what)


def no_getattr_with_default(source: Source) -> Iterator[Offence]:
    """getattr takes no default: on one's own types it silently skips the check that it was part of."""
    for node in source.nodes:
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[_, _, _]):
                yield Offence(source.path, node.lineno, "getattr with a default")


def no_swallowed_exceptions(source: Source) -> Iterator[Offence]:
    """No bare except, and no handler that does nothing."""
    for node in source.nodes:
        if not isinstance(node, ast.ExceptHandler):
            continue
        if node.type is None:
            yield Offence(source.path, node.lineno, "bare except")
        elif all(_does_nothing(statement) for statement in node.body):
            yield Offence(source.path, node.lineno, "an exception is swallowed")


def assertions_have_no_effect(source: Source) -> Iterator[Offence]:
    """An assertion changes nothing: it calls queries alone, so that `python -O` runs the same program."""
    for statement in source.nodes:
        if not isinstance(statement, ast.Assert):
            continue
        for node in ast.walk(statement):
            if what := _effect(node):
                yield Offence(source.path, statement.lineno, f"an assertion {what}")


def environment_is_read_in_cli(source: Source) -> Iterator[Offence]:
    """Settings are arguments: only `cli` and ENVIRONMENT_READERS read the environment."""
    if source.package == "cli" or source.module in ENVIRONMENT_READERS:
        return
    for node in source.nodes:
        match node:
            case ast.Attribute() if dotted_name(node) in {"os.environ", "os.environb", "os.getenv"}:
                yield Offence(source.path, node.lineno, f"uses {dotted_name(node)}")
            case ast.ImportFrom(module="os", names=names):
                for alias in names:
                    if alias.name in {"environ", "environb", "getenv"}:
                        yield Offence(source.path, node.lineno, f"imports {alias.name}")


def has_module_docstring(source: Source) -> Iterator[Offence]:
    """A file opens with what it owns, what it promises and who may call it."""
    if not ast.get_docstring(source.tree):
        yield Offence(source.path, 1, "no module docstring")


def nothing_unfinished(source: Source) -> Iterator[Offence]:
    """No notes of work to be done: what is in the tree is finished."""
    yield from _matching_lines(source, UNFINISHED, "a note of unfinished work")


def no_coverage_excuses(source: Source) -> Iterator[Offence]:
    """No comment takes a line or a branch out of the coverage."""
    yield from _matching_lines(source, COVERAGE_EXCUSE, "a coverage excuse")


def no_machine_paths(source: Source) -> Iterator[Offence]:
    """No path that exists on one machine only."""
    yield from _matching_lines(source, MACHINE_PATH, "an absolute path of one machine")


# Applied to every Python file below src, ...
SOURCE_RULES: tuple[Rule, ...] = (
    imports_run_downwards,
    third_party_stays_in_its_place,
    core_is_pure,
    no_code_running_loaders,
    file_is_short,
    functions_are_short,
    functions_take_few_parameters,
    no_getattr_with_default,
    no_swallowed_exceptions,
    assertions_have_no_effect,
    environment_is_read_in_cli,
)
# ... to every Python file below src and tests, ...
PYTHON_RULES: tuple[Rule, ...] = (has_module_docstring, nothing_unfinished, no_coverage_excuses)
# ... and to every text file of the repository.
TEXT_RULES: tuple[Rule, ...] = (no_machine_paths,)


def _matching_lines(source: Source, pattern: re.Pattern[str], what: str) -> Iterator[Offence]:
    for number, line in enumerate(source.text.splitlines(), start=1):
        if found := pattern.search(line):
            yield Offence(source.path, number, f"{what}: {found.group()}")


def _functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _package_of(module: str) -> str:
    """The package below `holdfast` that a dotted name leads to; empty for a name of the top-level module."""
    below = module.split(".")[1:2]
    return below[0] if below and below[0] in MAY_IMPORT else ""


def _is_triton_jit(decorator: ast.expr) -> bool:
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return dotted_name(target) == "triton.jit"


def _effect(node: ast.AST) -> str:
    """What an expression in an assertion does besides answering, as a verb; empty if nothing is known."""
    match node:
        case ast.NamedExpr(target=target):
            return f"assigns {target.id}"
        case ast.Await() | ast.Yield() | ast.YieldFrom():
            return "waits"
        case ast.Call(func=ast.Attribute(attr="get"), args=[_, *_]):
            return ""  # Of a mapping, with a key; a queue's has none.
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return "" if name in CALLS_WITHOUT_EFFECT else f"calls {name}"
        case ast.Call():
            return "calls something without a name"
    return ""


def _does_nothing(statement: ast.stmt) -> bool:
    match statement:
        case ast.Pass() | ast.Expr(value=ast.Constant()):
            return True
    return False
