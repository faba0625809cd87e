"""Every rule can fail: each gets snippets that break it and a neighbour of them that does not."""

import pytest

from tests.tidy import rules
from tests.tidy.imports import Source
from tests.tidy.rules import PYTHON_RULES, SOURCE_RULES, TEXT_RULES, Rule

CORE = "src/holdfast/core/ledger.py"
ENGINE = "src/holdfast/engine/loop.py"

# Put together from pieces, so that this file does not break the rules that it tests.
UNFINISHED = "# TO" + "DO: later"
EXCUSE = "x = 1  # pragma" + ": no cover"
HOME = "/ho" + "me/somebody/model"

BROKEN: list[tuple[Rule, str, str]] = [
    (rules.imports_run_downwards, CORE, "import holdfast.engine"),
    (rules.imports_run_downwards, CORE, "from holdfast import sim"),
    (rules.imports_run_downwards, CORE, "from holdfast import __version__"),
    (rules.imports_run_downwards, CORE, "def f():\n    from holdfast.models import config"),
    (rules.imports_run_downwards, CORE, "from . import tokens"),
    (rules.imports_run_downwards, "src/holdfast/sim/world.py", "from holdfast.engine.loop import Loop"),
    (rules.imports_run_downwards, "src/holdfast/kernels/pages.py", "import holdfast.models.config"),
    (rules.imports_run_downwards, "src/holdfast/models/config.py", "from holdfast.core.layout import Layout"),
    (rules.imports_run_downwards, "src/holdfast/client/http.py", "from holdfast.server import app"),
    (rules.imports_run_downwards, "src/holdfast/engine/loop.py", "import_module('holdfast.server')"),
    (rules.imports_run_downwards, "src/holdfast/__init__.py", "from holdfast.server import app"),
    (rules.imports_run_downwards, "src/holdfast/server/serve.py", "import holdfast.bench.timing"),
    (rules.imports_run_downwards, "src/holdfast/bench/tables.py", "from holdfast.cli import refusals"),
    (rules.imports_run_downwards, "src/holdfast/misc/things.py", "import math"),
    (rules.third_party_stays_in_its_place, ENGINE, "import uvloop"),
    (rules.third_party_stays_in_its_place, "src/holdfast/sim/world.py", "from torch import Tensor"),
    (rules.third_party_stays_in_its_place, "src/holdfast/client/http.py", "import torch"),
    (rules.third_party_stays_in_its_place, ENGINE, "from transformers import AutoConfig"),
    (rules.third_party_stays_in_its_place, "src/holdfast/bench/gpu/__main__.py", "import rich"),
    (rules.third_party_stays_in_its_place, "src/holdfast/bench/core/turns.py", "import torch"),
    (rules.third_party_stays_in_its_place, "src/holdfast/bench/loops.py", "import transformers"),
    (rules.core_is_pure, CORE, "import time"),
    (rules.core_is_pure, CORE, "from os.path import join"),
    (rules.core_is_pure, CORE, "import numpy"),
    (rules.core_is_pure, CORE, "from holdfast import Engine"),
    (rules.core_is_pure, CORE, "def f():\n    import random"),
    (rules.core_is_pure, CORE, "open('state')"),
    (rules.core_is_pure, "src/holdfast/cluster/owner.py", "import time"),
    (rules.core_is_pure, "src/holdfast/cluster/owner.py", "from holdfast.core import session"),
    (rules.no_code_running_loaders, ENGINE, "import pickle"),
    (rules.no_code_running_loaders, ENGINE, "from pickle import loads"),
    (rules.no_code_running_loaders, ENGINE, "from marshal import *"),
    (rules.no_code_running_loaders, ENGINE, "import_module('dill')"),
    (rules.no_code_running_loaders, ENGINE, "eval('1')"),
    (rules.no_code_running_loaders, ENGINE, "exec('x = 1')"),
    (rules.no_code_running_loaders, ENGINE, "__import__('json')"),
    (rules.no_code_running_loaders, ENGINE, "weights = torch.load(path)"),
    (rules.no_code_running_loaders, ENGINE, "from torch import load"),
    (rules.no_code_running_loaders, ENGINE, "read = torch.load"),
    (rules.no_code_running_loaders, ENGINE, "from_pretrained(name, trust_remote_code=True)"),
    (rules.no_code_running_loaders, ENGINE, "numpy.load(path, allow_pickle=maybe)"),
    (rules.file_is_short, ENGINE, "x = 1\n" * 601),
    (rules.functions_are_short, ENGINE, "def f():\n" + "    x = 1\n" * 90),
    (rules.functions_are_short, ENGINE, "class C:\n    async def f(self):\n" + "        x = 1\n" * 90),
    (rules.functions_take_few_parameters, ENGINE, "def f(a, b, c, d, e, f, g, h, /, i, *, j): return a"),
    (
        rules.functions_take_few_parameters,
        ENGINE,
        "class C:\n def f(self, a, b, c, d, e, f, g, h, i, j): return a",
    ),
    (rules.no_getattr_with_default, ENGINE, "getattr(turn, 'end', None)"),
    (rules.no_swallowed_exceptions, ENGINE, "try:\n    f()\nexcept:\n    raise"),
    (rules.no_swallowed_exceptions, ENGINE, "try:\n    f()\nexcept ValueError:\n    pass"),
    (rules.no_swallowed_exceptions, ENGINE, "try:\n    f()\nexcept ValueError:\n    'why'\n    ..."),
    (rules.assertions_have_no_effect, CORE, "assert mark is not None and mark.cuts.pop(0) == planned, 'no'"),
    (rules.assertions_have_no_effect, CORE, "assert next(numbers) == 1"),
    (rules.assertions_have_no_effect, CORE, "assert not pending.discard(turn)"),
    (rules.assertions_have_no_effect, CORE, "assert hold.release() is None"),
    (rules.assertions_have_no_effect, CORE, "assert len(ledger.take(pool, 1, holder).units) == 1"),
    (rules.assertions_have_no_effect, CORE, "assert all(each.close() for each in open_files)"),
    (rules.assertions_have_no_effect, CORE, "assert (known := len(tokens)) > 0"),
    (rules.assertions_have_no_effect, CORE, "assert ready, log.append('not ready')"),
    (rules.assertions_have_no_effect, CORE, "assert handlers[0]()"),
    (rules.assertions_have_no_effect, ENGINE, "assert inbox.get() is None"),
    (rules.assertions_have_no_effect, ENGINE, "async def f():\n    assert await answer"),
    (rules.environment_is_read_in_cli, ENGINE, "import os\nhome = os.environ.get('HOME')"),
    (rules.environment_is_read_in_cli, ENGINE, "import os\nhome = os.getenv('HOME')"),
    (rules.environment_is_read_in_cli, "src/holdfast/bench/served.py", "from os import environ"),
    (rules.has_module_docstring, ENGINE, "x = 1"),
    (rules.has_module_docstring, ENGINE, '"""  """'),
    (rules.nothing_unfinished, ENGINE, UNFINISHED),
    (rules.no_coverage_excuses, CORE, EXCUSE),
    (rules.no_machine_paths, "docs/start.md", f"Put it into {HOME}."),
    (rules.no_machine_paths, "Makefile", f"MODEL={HOME}"),
]

FINE: list[tuple[Rule, str, str]] = [
    (rules.imports_run_downwards, CORE, "from holdfast.core.tokens import TokenLog"),
    (rules.imports_run_downwards, ENGINE, "from holdfast.models import config\nimport holdfast.core.plan"),
    (rules.imports_run_downwards, "src/holdfast/cli/version.py", "from holdfast import __version__"),
    (rules.imports_run_downwards, "src/holdfast/cli/bench.py", "import holdfast.bench.tables"),
    (rules.imports_run_downwards, "src/holdfast/__init__.py", "from holdfast.engine import Engine"),
    (rules.third_party_stays_in_its_place, "src/holdfast/server/app.py", "import fastapi"),
    (rules.third_party_stays_in_its_place, ENGINE, "import torch, numpy"),
    (rules.third_party_stays_in_its_place, "src/holdfast/bench/tables.py", "import rich"),
    (rules.third_party_stays_in_its_place, "src/holdfast/bench/beside/http.py", "import transformers"),
    (
        rules.third_party_stays_in_its_place,
        "src/holdfast/models/norm.py",
        "import holdfast.kernels.torch.norm",
    ),
    (
        rules.core_is_pure,
        CORE,
        "import bisect, sys\nfrom collections.abc import Iterator\nimport holdfast.core.tokens",
    ),
    (rules.core_is_pure, ENGINE, "import time, threading"),
    (
        rules.no_code_running_loaders,
        ENGINE,
        "import re\nre.compile('x')\nmodel.eval()\ntorch.compile(f)\njson.load(f)",
    ),
    (rules.no_code_running_loaders, ENGINE, "numpy.load(path, allow_pickle=False)"),
    (rules.file_is_short, ENGINE, "x = 1\n" * 600),
    (rules.functions_are_short, ENGINE, "def f():\n" + "    x = 1\n" * 89),
    (
        rules.functions_take_few_parameters,
        ENGINE,
        "class C:\n def f(self, a, b, c, d, e, f, g, h, i): return a",
    ),
    (
        rules.functions_take_few_parameters,
        "src/holdfast/cli/serve.py",
        "def f(a, b, c, d, e, f, g, h, i, j): pass",
    ),
    (rules.functions_take_few_parameters, ENGINE, "@triton.jit\ndef f(a, b, c, d, e, f, g, h, i, j): pass"),
    (rules.no_getattr_with_default, ENGINE, "getattr(torch, name)"),
    (rules.no_swallowed_exceptions, ENGINE, "try:\n    f()\nexcept ValueError:\n    count += 1"),
    (rules.assertions_have_no_effect, CORE, "cut = cuts.pop(0)\nassert cut == planned"),
    (rules.assertions_have_no_effect, CORE, "assert isinstance(x, int) and 0 < len(x.units) <= min(a, b)"),
    (rules.assertions_have_no_effect, CORE, "assert parent.children.get(first) is node, f'{len(node.key)}'"),
    (rules.assertions_have_no_effect, ENGINE, "assert all(each.stride(-1) == 1 for each in tensors)"),
    (rules.environment_is_read_in_cli, "src/holdfast/cli/serve.py", "import os\nos.environ['HOME']"),
    (rules.environment_is_read_in_cli, ENGINE, "import os\nos.getpid()"),
    (rules.has_module_docstring, ENGINE, '"""Owns the loop."""'),
    (rules.nothing_unfinished, ENGINE, "# Mastodon"),
    (rules.no_coverage_excuses, CORE, "# No cover is needed here."),
    (
        rules.no_machine_paths,
        "docs/start.md",
        "src/holdfast/core, https://example.org/home/page, $(ROOT)/work/x",
    ),
]


def name(case: object) -> str | None:
    return case.__name__ if callable(case) else None


@pytest.mark.parametrize(("rule", "path", "snippet"), BROKEN, ids=name)
def test_rule_fails(rule: Rule, path: str, snippet: str) -> None:
    offences = list(rule(Source(path, snippet)))
    assert len(offences) >= 1
    assert all(str(offence).startswith(f"{path}:{offence.line}: ") for offence in offences)
    assert all(1 <= offence.line <= len(snippet.splitlines()) for offence in offences)


@pytest.mark.parametrize(("rule", "path", "snippet"), FINE, ids=name)
def test_rule_passes(rule: Rule, path: str, snippet: str) -> None:
    assert list(rule(Source(path, snippet))) == []


@pytest.mark.parametrize("cases", [BROKEN, FINE], ids=["broken", "fine"])
def test_every_rule_has_a_snippet(cases: list[tuple[Rule, str, str]]) -> None:
    assert {rule for rule, _, _ in cases} == {*SOURCE_RULES, *PYTHON_RULES, *TEXT_RULES}


def test_offence_names_the_line() -> None:
    (offence,) = rules.no_getattr_with_default(Source(ENGINE, "x = 1\n\ngetattr(x, 'y', 0)\n"))
    assert str(offence) == f"{ENGINE}:3: getattr with a default"
