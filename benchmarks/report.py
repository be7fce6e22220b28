"""The results as a page of tables, made from what the benchmarks wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import OWN, RESULTS

#: The benchmarks in the order of the page.
ORDER = ("acquire_release", "hand_over", "in_line", "redlock", "worker", "beat")

_HEAD = """# What the locks cost

Made by `make bench`; do not edit. Each figure is measured in turns with a baseline, in the same run, and only its ratio
to the baseline counts: **× is how many times the baseline's cost, so the lower, the better**. The range from 10 % to
90 % of the rounds is in brackets. The ratio of a baseline is to its own second turn: that is the noise of the machine.
The other columns are from the same run, and are valid for that machine only.
"""


def write(directory: Path = RESULTS) -> Path:
    """Make README.md from the results in the directory."""
    page = directory / "README.md"
    page.write_text("\n".join([_HEAD, *map(section, load(directory))]))
    return page


def load(directory: Path = RESULTS) -> list[Mapping[str, Any]]:
    """The results in the directory."""
    paths = [directory / f"{name}.json" for name in ORDER]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def section(result: Mapping[str, Any]) -> str:
    """One result in Markdown."""
    lines = [f"## {result['title']}", ""]
    for table in result["tables"]:
        lines += [f"**{table['title']}**", "", *_table(table), ""]
    lines += [f"- {note}" for note in result["notes"]]
    lines.append(f"- {', '.join(f'{name} {version}' for name, version in result['machine'].items())}.")
    if result["quick"]:
        lines.append("- A quick run, for a first look only.")
    return "\n".join([*lines, ""])


def times(value: float) -> str:
    """A ratio in three digits, without an exponent."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}" if value >= 0.0001 else f"{value:.6f}"


def _table(table: Mapping[str, Any]) -> list[str]:
    columns = list(dict.fromkeys(name for row in table["rows"] for name in row["columns"]))
    # Without a comparison there is no baseline.
    head = ["", *([f"× {table['baseline']}"] if table["baseline"] else []), *columns]
    lines = [_line(head), _line(["---"] * len(head))]
    for row in table["rows"]:
        shown = [_shown(row["ratio"]) if row["ratio"] else "–"] if table["baseline"] else []
        cells = [*shown, *(row["columns"].get(column, "") for column in columns)]
        lines.append(_line([_name(row["name"]), *cells]))
    return lines


def _shown(ratio: Mapping[str, float]) -> str:
    return f"**{times(ratio['median'])}** ({times(ratio['low'])} – {times(ratio['high'])})"


def _name(name: str) -> str:
    return f"**{name}**" if name.startswith(OWN) else name


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
