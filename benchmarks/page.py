"""A race's table, and the page that shows it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

BEGIN, END = "<!-- race -->", "<!-- /race -->"


def table(found: Mapping[str, Mapping[str, str]], about: str) -> str:
    """In Markdown: a row for each event, a column for each contestant."""
    events = [*next(iter(found.values()))]
    lines = [f"| | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    lines += [f"| {event} | {' | '.join(cells[event] for cells in found.values())} |" for event in events]
    return "\n".join([*lines, "", f"({about}.)"])


def tell(about: str | None, made: Callable[[], str]) -> None:
    """Print a table and, if the command line says so, put it between the marks in a page."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table between the marks in this file")
    page = parser.parse_args().write
    shown = made()
    print(shown)
    if page:
        before, _, rest = page.read_text().partition(BEGIN)
        page.write_text(f"{before}{BEGIN}\n{shown}\n{END}{rest.partition(END)[2]}")
