"""Reads from the record who ran when, draws it for a terminal, and counts overlaps."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

#: Columns of the time axis.
WIDTH = 84

STYLES = {"report": "bold green", "plain job": "yellow"}

#: How a run begins and continues, so that the jobs can be distinguished without colours as well.
GLYPHS = {"report": ("▌", "█"), "plain job": ("▒", "░")}


@dataclass(frozen=True)
class Run:
    job: str
    worker: str
    pid: int
    start: float
    end: float
    killed: bool = False


def read(events: Iterable[bytes], killed_at: float) -> tuple[list[Run], list[dict[str, object]]]:
    """The runs and the skipped copies; a run without an end ended when its worker was killed."""
    open_runs, runs, skipped = {}, [], []
    for event in map(json.loads, events):
        if event["event"] == "start":
            open_runs[event["id"]] = event
        elif event["event"] == "end":
            begun = open_runs.pop(event["id"])
            runs.append(Run(begun["job"], begun["worker"], begun["pid"], begun["at"], event["at"]))
        else:
            skipped.append(event)
    for begun in open_runs.values():
        runs.append(Run(begun["job"], begun["worker"], begun["pid"], begun["at"], killed_at, killed=True))
    return sorted(runs, key=lambda run: run.start), skipped


def overlaps(runs: list[Run], job: str) -> int:
    """How many pairs of runs of the job were under way at the same time."""
    of_job = [run for run in runs if run.job == job]
    return sum(second.start < first.end for index, first in enumerate(of_job) for second in of_job[index + 1 :])


def draw(console: Console, runs: list[Run], skipped: list[dict[str, object]], killed_at: float) -> None:
    """A row for each slot, a bar for each run, a cross for each copy that was skipped."""
    begin, end = min(run.start for run in runs), max(run.end for run in runs)

    def column(at: float) -> int:
        return min(max(int((at - begin) / (end - begin) * WIDTH), 0), WIDTH - 1)

    table = Table(title="who ran when", caption=f"0 s … {end - begin:.1f} s", box=None, pad_edge=False)
    table.add_column("slot", style="cyan", no_wrap=True)
    table.add_column("", no_wrap=True)
    slots = sorted({(run.worker, run.pid) for run in runs} | {(str(s["worker"]), int(str(s["pid"]))) for s in skipped})
    for worker, pid in slots:
        row = Text("·" * WIDTH, style="dim")
        for event in skipped:
            if event["pid"] == pid:
                place(row, column(float(str(event["at"]))), "×", "red")
        for run in runs:
            if run.pid == pid:
                bar(row, column(run.start), column(run.end), run)
        if worker.startswith("one"):
            place(row, column(killed_at), "☠", "bold red")
        table.add_row(f"{worker.partition('@')[0]} {pid}", row)
    console.print(table)
    console.print(
        Text("█ report (exclusive)  ", STYLES["report"])
        + Text("░ plain job  ", STYLES["plain job"])
        + Text("× a copy was skipped  ☠ the worker was killed", "red")
    )


def bar(row: Text, first: int, last: int, run: Run) -> None:
    for at in range(first, last + 1):
        place(row, at, GLYPHS[run.job][at > first], STYLES[run.job])


def place(row: Text, at: int, char: str, style: str) -> None:
    plain = row.plain
    row.plain = plain[:at] + char + plain[at + 1 :]
    row.stylize(style, at, at + 1)
