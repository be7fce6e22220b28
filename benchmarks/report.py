"""The results as a page of tables and a plot, made from what the benchmarks wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import OWN, RESULTS

#: Colours that are readable on white and on black.
INK, THEIRS, OWN_COLOR = "#7d8590", "#7d8590", "#2f81f7"

#: The benchmarks in the order of the page.
ORDER = ("acquire_release", "hand_over", "in_line", "redlock", "worker", "beat")

_HEAD = """# What the locks cost

Made by `make bench`; do not edit. Each figure is measured in turns with a baseline, in the same run, and only its ratio
to the baseline counts: **× is how many times the baseline's cost, so the lower, the better**. The range from 10 % to
90 % of the rounds is in brackets. The ratio of a baseline is to its own second turn: that is the noise of the machine.
The other columns are from the same run, and are valid for that machine only.

![All ratios](ratios.svg)
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


def plot(directory: Path = RESULTS) -> Path:
    """All ratios in ratios.svg: a dot for the median, a line for the spread."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ratios", "font.size": 9})
    mpl.rcParams.update(dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "axes.edgecolor"), INK))
    from matplotlib import pyplot

    tables = [table for result in load(directory) for table in result["tables"] if _rated(table)]
    heights = [len(_rated(table)) + 1.6 for table in tables]
    figure, axes = pyplot.subplots(
        *(len(tables), 1), figsize=(8.5, 0.23 * sum(heights)), height_ratios=heights, squeeze=False
    )
    for axis, table in zip(axes[:, 0], tables, strict=True):
        _panel(axis, table)
    figure.tight_layout()
    path = directory / "ratios.svg"
    figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    # matplotlib writes lines that end in blanks, which the commit hooks would reject.
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
    return path


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


def _rated(table: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in table["rows"] if row["ratio"]]


def _panel(axis: Any, table: Mapping[str, Any]) -> None:
    rows = _rated(table)
    for place, row in enumerate(reversed(rows)):
        ratio, color = row["ratio"], OWN_COLOR if row["name"].startswith(OWN) else THEIRS
        axis.plot([ratio["low"], ratio["high"]], [place, place], color=color, linewidth=2.5, alpha=0.55)
        axis.plot([ratio["median"]], [place], "o", color=color, markersize=5)
        label = f"{times(ratio['median'])}×"
        axis.annotate(label, (1.01, place), xycoords=("axes fraction", "data"), va="center", color=color)
    axis.set_yticks(range(len(rows)), [row["name"] for row in reversed(rows)])
    for tick, row in zip(axis.get_yticklabels(), reversed(rows), strict=True):
        tick.set_color(OWN_COLOR if row["name"].startswith(OWN) else INK)
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.set_xscale("log")
    low, high = (end(row["ratio"][key] for row in rows) for end, key in ((min, "low"), (max, "high")))
    axis.set_xlim(min(low / 1.3, 0.7), max(high * 1.3, 1.5))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axis.xaxis.set_minor_formatter(lambda value, _: "")
    axis.axvline(1, color=INK, linewidth=0.8, linestyle=":")
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.set_title(f"{table['title']}  (× {table['baseline']}; less is better)", loc="left", fontsize=9)
