"""Changes of a Lua script."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.mutation.change import Edit

_INSTEAD = {
    "==": "~=",
    "~=": "==",
    "<=": "<",
    ">=": ">",
    "<": "<=",
    ">": ">=",
    "+": "-",
    "-": "+",
    "and": "or",
    "or": "and",
    "not": "",
    "true": "false",
    "false": "true",
}
#: Comments, texts, indexes of keys and arguments, and signs before a number or a word are not operators.
_TOKEN = re.compile(
    r"(?P<skip>--[^\n]*|'[^']*'|\b(?:KEYS|ARGV)\[[^]]*\])"
    r"|(?P<operator>==|~=|<=|>=|\.\.|[<>+]|(?<= )-(?= )|\b(?:and|or|not|true|false)\b)"
    r"|(?P<number>(?<![\w.])\d+(?![\w.]))"
)
_CALL = re.compile(r"^[ ]*(?P<call>redis\.p?call\([^\n]*\)|\w+\([^\n]*\))$", re.MULTILINE)


def edits(text: str) -> Iterator[Edit]:
    """All possible edits of a script, one by one."""
    for token in _TOKEN.finditer(text):
        old = token.group()
        if token.lastgroup == "number":
            yield Edit(*token.span(), str(int(old) + 1), "number")
        elif old in _INSTEAD:
            yield Edit(*token.span(), _INSTEAD[old], "operator")
    for call in _CALL.finditer(text):
        yield Edit(*call.span("call"), "", "left out")
