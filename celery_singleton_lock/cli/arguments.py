"""The arguments of a call, as an operator writes them in a shell: `7 march full=true 'tags=["a"]'`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn

import click


def parse(words: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """The positional and the keyword arguments in these words.

    Args:
        words: each is JSON or, if it is not valid JSON, a text; `name=value` is a keyword argument, whose value is read
            in the same way. Write a text that would be misread as JSON: `'"7"'`, `'"a=b"'`.

    Raises:
        UsageError: a keyword argument was given twice.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for word in words:
        name, is_keyword, value = word.partition("=")
        if not is_keyword or not name.isidentifier():
            args.append(_value(word))
        elif name in kwargs:
            raise click.UsageError(f"the argument {name!r} is given twice")
        else:
            kwargs[name] = _value(value)
    return args, kwargs


def _value(word: str) -> Any:
    try:
        return json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return word


def _refuse(constant: str) -> NoReturn:
    """NaN and Infinity are not JSON, but Python's parser accepts them."""
    raise ValueError(constant)
