"""A race's table, and the page that shows it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

BEGIN, END = "<!-- race -->", "<!-- /race -->"


def table(found: Mapping[str, Mapping[str, str]], about: str, *, beside: int = 3) -> str:
    """The tables in Markdown: a row for each event, a column for each contestant. The first contestant is in each
    table, with as many others as fit on a page.
    """
    first, *others = found
    groups = [others[start : start + beside] for start in range(0, len(others), beside)]
    tables = [_table({name: found[name] for name in (first, *group)}) for group in groups]
    return "\n\n".join([*tables, f"({about}.)"])


def _table(found: Mapping[str, Mapping[str, str]]) -> str:
    events = [*next(iter(found.values()))]
    lines = [f"| | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    lines += [f"| {event} | {' | '.join(cells[event] for cells in found.values())} |" for event in events]
    return "\n".join(lines)


def tell(about: str | None, made: Callable[[], str]) -> None:
    """Print a table and, if the command line says so, insert it between the marks in a page."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--write", type=Path, metavar="FILE", help="insert the table between the marks in this file")
    page = parser.parse_args().write
    shown = made()
    print(shown)
    if page:
        before, _, rest = page.read_text().partition(BEGIN)
        page.write_text(f"{before}{BEGIN}\n{shown}\n{END}{rest.partition(END)[2]}")
