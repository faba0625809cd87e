"""GBNF: its notation, and what becomes a terminal."""

from __future__ import annotations

import pytest

from holdfast.engine.constraints.gbnf import to_lark
from holdfast.engine.constraints.grammar import Kind
from tests.constraints.conftest import Open
from tests.constraints.vocabularies import END

JSON = r"""
# JSON, as llama.cpp writes it.
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""

CASES: list[tuple[str, list[str], list[str]]] = [
    (JSON, ['{"a": [1, -2.5e3, "b\\n", "\\u00e9"], "é": {}}', "{}"], ["[]", '{"a"}', '{"a": 01}']),
    ('root ::= "a"\n     | "b"\n     | other\nother ::= "c"', ["a", "b", "c"], ["d", "ab"]),
    (r'root ::= "\x41\u00e9\U0001F600\"\\\n"', ['Aé😀"\\\n'], ["A"]),
    (r"root ::= [a\-z\]^]+", ["a-z]^", "^"], ["b", "["]),
    ("root ::= [^a-c\\n]", ["d", "é", "-"], ["a", "b", "\n"]),
    ("root ::= [-x] [x-]", ["--", "xx"], ["y-"]),
    ("root ::= . .", ["a\n", "é日"], ["a"]),
    ('root ::= "a"{2} "b"{1,} "c"{0,1}', ["aab", "aabbbc"], ["ab", "aa", "aabcc"]),
    ('root ::= ("ab" | "c")+ "d"? ""', ["abcab", "cd"], ["", "d"]),
    ('root ::= my-rule My_Rule\nmy-rule ::= "x"\nMy_Rule ::= "y"', ["xy"], ["xx"]),
    ('root ::= "(" root ")" | "x"', ["x", "((x))"], ["(x", "()"]),
    ("root ::= [[&&~~-]+", ["[&~-"], ["a"]),
]


@pytest.mark.parametrize(("source", "good", "bad"), CASES)
def test_notation(open_matcher: Open, source: str, good: list[str], bad: list[str]) -> None:
    for text in [*good, *bad]:
        matcher = open_matcher(Kind.GBNF, source)
        tokens = matcher.vocabulary.tokenizer.tokenize_str(text)
        assert matcher.accept([*tokens, END]) == (text in good), text


def test_rules_without_recursion_become_terminals() -> None:
    lark = to_lark('root ::= list\nlist ::= word ("," list)?\nword ::= letter+\nletter ::= [a-z]')
    assert lark.splitlines() == [
        "start: r1",
        'r1: T2 ( "," r1 )?',
        "T2: ( T3 )+",
        r"T3: /[\x{61}-\x{7A}]/",
    ]
