"""A trace for people: the time, and a column for what each process did."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.plan import Plan

WIDTH = 150

#: The narrowest readable column.
NARROWEST = 18

#: They concern all processes, and go across the columns.
_ACROSS = ("nemesis", "checker", "broker", "world")

Line = tuple[float, str, str, str]


def of_trace(trace: Sequence[Line], width: int = WIDTH) -> Iterator[str]:
    """The lines of a table; or of a list, if there are too many processes for a table."""
    says = Counter(_process(who) for _, who, _, _ in trace if _process(who) not in _ACROSS)
    # Many processes only start.
    columns = [process for process, lines in says.items() if lines > 1]
    column = (width - 10) // len(columns) - 2 if columns else width
    if column < NARROWEST:
        for when, who, what, detail in trace:
            yield f"{when:9.4f} {who:<14} {what:<18} {detail}".rstrip()
        return
    yield _row("", columns, column)
    for when, who, what, detail in trace:
        process = _process(who)
        if says[process] == 1:
            continue
        text = f"{what} {detail}".rstrip()
        if process in _ACROSS:
            yield f"{when:9.4f} ── {who}: {text} ".ljust(width, "─")
            continue
        place = columns.index(process)
        for number, part in enumerate(textwrap.wrap(text, column) or [""]):
            yield _row("" if number else f"{when:9.4f}", [""] * place + [part], column)


def _process(who: str) -> str:
    """The process, without the thread."""
    return who.partition("/")[0]


def _row(when: str, cells: Iterable[str], column: int) -> str:
    return f"{when:<9} " + "  ".join(f"{cell:<{column}}" for cell in cells).rstrip()


def of_plan(plan: Plan) -> Iterator[str]:
    """The plan, for people."""
    servers = "one server" if plan.nodes == 1 else f"a Redlock of {plan.nodes}"
    yield (
        f"seed {plan.seed}, {plan.kind}: {plan.workers} workers ({plan.pool}, {plan.concurrency} at once), {servers}, "
        f"ttl {plan.ttl:g} s, visibility {plan.visibility:g} s, a preemption each {plan.interval:g} statements"
    )
    for message in plan.messages:
        follows = ", with a message that follows" if message.chained else ""
        yield f"{message.at:9.3f} message {message.number}: {message.task}({message.key}) {message.words}{follows}"
    for use in plan.uses:
        yield (
            f"{use.at:9.3f} use {use.number}: {use.name} by program {use.program}, thread {use.thread}, "
            f"for {use.takes:g} s, waits {use.patience} s {' '.join(sorted(use.ways))}".rstrip()
        )
    for name, seconds in plan.entries:
        yield f"{'':9} entry {name}: each {seconds:g} s"
    for fault in plan.faults:
        yield f"{fault.at:9.3f} fault: {fault.kind} #{fault.target} for {fault.seconds:g} s"
