"""Which task held which lock and when, as one self-contained page of HTML: a chart of each lock, and a table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from importlib.resources import files
from string import Template

from celery_singleton_lock.journal_entry import CRASHED, REFUSALS, Entry
from celery_singleton_lock.keys.key import name_in
from celery_singleton_lock.stores.base import Held

#: The table is open from the start if it has at most this many rows.
OPEN = 100

#: The number of marks on the axis.
TICKS = 6

#: The outcome of an entry that is still running.
RUNNING = "running"

#: The sign of each kind; all other kinds are marked as refused.
_SIGNS = {
    **dict.fromkeys(("retry", "rerun", "replace", "join", "follow", "stand-by", "drop", "repeat"), "↻"),
    "joined": "=",
    "superseded": "»",
    "duplicate": "≡",
    "free": "†",
}


@dataclass(frozen=True, slots=True)
class Window:
    """The time that is shown: seconds since the epoch, on the lock server's clock."""

    since: float
    until: float

    def share(self, moment: float) -> float:
        """The position of a moment in the window, from 0 to 1."""
        return min(max((moment - self.since) / (self.until - self.since), 0.0), 1.0)


def running(key: str, held: Held, now: float) -> Entry | None:
    """The entry of a lock that is held; None if no process is known to run."""
    holder = held.holder
    if holder is None or not holder.pid:
        return None
    # The holder's clock is not the server's, but close enough for a picture.
    began = min(holder.since, now)
    return Entry(
        "run",
        name_in(key),
        key,
        holder.task_id,
        holder.node,
        holder.pid,
        began,
        now,
        outcome=RUNNING,
        limit=(held.slot or 0) + 1,
        label=holder.label,
    ).cleaned()


def without_waits(entries: Sequence[Entry]) -> list[Entry]:
    """The entries of one key in order, each run from when it had the lock.

    Of a run that has not ended, or that died, only the time when it asked for the lock is known. With `lock_wait` that
    may be before the end of the run before it; until then it waited.
    """
    return sorted((_without_wait(entry, entries) for entry in entries), key=lambda it: it.began)


def _without_wait(entry: Entry, entries: Sequence[Entry]) -> Entry:
    if entry.outcome not in (RUNNING, CRASHED) or entry.limit != 1:
        return entry
    before = [it.ended for it in entries if it.ran and it is not entry and entry.began < it.ended <= entry.ended]
    began = max(before, default=entry.began)
    return entry._replace(began=began, waited=began - entry.began)


def page(title: str, entries: Sequence[Entry], window: Window) -> str:
    template = Template(files(__package__).joinpath("timeline.html").read_text(encoding="utf-8"))
    by_time = sorted(entries, key=lambda it: it.began)
    return template.substitute(
        title=escape(title),
        summary=escape(_summary(entries, window)),
        charts="\n".join(_charts(entries, window)) or "<p>Nothing happened.</p>",
        open=" open" if len(entries) <= OPEN else "",
        count=len(entries),
        rows="\n".join(map(_row, by_time)),
    )


def _summary(entries: Sequence[Entry], window: Window) -> str:
    counts = Counter(_ending(entry) for entry in entries)
    parts = ", ".join(f"{count} {what}" for what, count in counts.most_common())
    return f"{_moment(window.since)} to {_moment(window.until)} UTC: {parts or 'nothing'}"


def _charts(entries: Sequence[Entry], window: Window) -> Iterator[str]:
    """One chart for each lock's name, with a lane for each key; the key whose entry began first is on top."""
    by_name: defaultdict[str, defaultdict[str, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in sorted(entries, key=lambda it: it.began):
        by_name[name_in(entry.key)][entry.key].append(entry)
    for name, lanes in by_name.items():
        keys = "1 key" if len(lanes) == 1 else f"{len(lanes)} keys"
        yield f'<h2>{escape(name)} <span class="faint">{keys}</span></h2>'
        yield f'<div class="scroll"><div class="chart">{_axis(window)}{"".join(_lanes(lanes, window))}</div></div>'


def _axis(window: Window) -> str:
    step = (window.until - window.since) / TICKS
    ticks = [window.since + step * number for number in range(TICKS)]
    marks = [f'<span style="left:{100 * window.share(tick):.2f}%">{_moment(tick)[11:19]}</span>' for tick in ticks]
    return f'<div class="axis">{"".join(marks)}</div>'


def _lanes(lanes: Mapping[str, Sequence[Entry]], window: Window) -> Iterator[str]:
    for key, entries in lanes.items():
        name = next((it.label for it in entries if it.label), key.rpartition(":")[2].rstrip("}")[:12])
        for number, beside in enumerate(beside_each_other(without_waits(entries)), 1):
            bars = "".join(bar for entry in beside for bar in _bars(entry, window))
            shown = escape(name) if number == 1 else f'<span class="faint">and beside it ({number})</span>'
            yield f'<div class="row"><b title="{escape(key)}">{shown}</b><div class="lane">{bars}</div></div>'


def beside_each_other(entries: Sequence[Entry]) -> list[list[Entry]]:
    """The entries of one key, in the smallest number of lanes in which no run is drawn over another.

    With `lock_limit` several run at once; otherwise a second lane means an overlap.
    """
    lanes: list[list[Entry]] = [[]]
    ends = [float("-inf")]
    for entry in entries:
        lane = 0
        if entry.ran:
            lane = next((number for number, end in enumerate(ends) if end <= entry.began), len(ends))
            if lane == len(ends):
                lanes.append([])
                ends.append(entry.ended)
            ends[lane] = entry.ended
        lanes[lane].append(entry)
    return lanes


def _bars(entry: Entry, window: Window) -> Iterator[str]:
    title = escape(in_words(entry))
    left, right = window.share(entry.began), window.share(entry.ended)
    if not entry.ran:
        sign, kind = _SIGNS.get(entry.kind, "\u00d7"), "free" if entry.kind == "free" else "copy"
        marked = "mark" if entry.kind in REFUSALS else f"mark {kind}"
        yield f'<i class="{marked}" data-sign="{sign}" style="left:{100 * left:.3f}%" title="{title}"></i>'
        return
    asked = window.share(entry.began - entry.waited)
    if left - asked > 0.0005:
        yield f'<i class="wait" style="left:{100 * asked:.3f}%;width:{100 * (left - asked):.3f}%" title="{title}"></i>'
    outcome = "now" if entry.outcome == RUNNING else escape(entry.outcome.lower())
    yield f'<i class="{outcome}" style="left:{100 * left:.3f}%;width:{100 * (right - left):.3f}%" title="{title}"></i>'
    if entry.outcome == CRASHED:
        sign = _SIGNS["free"]
        yield f'<i class="mark free" data-sign="{sign}" style="left:{100 * right:.3f}%" title="{title}"></i>'


def in_words(entry: Entry) -> str:
    on_node = f" on {entry.holder_node}" if entry.holder_node else ""
    holder = f", held by {entry.holder}{on_node}" if entry.holder else ""
    waited = f", waited {entry.waited:.2f} s" if entry.waited >= 0.005 else ""
    after = "after" if entry.outcome == CRASHED else "for"
    seconds = f" {after} {entry.ended - entry.began:.2f} s" if entry.ran else ""
    where = f" on {entry.node} (pid {entry.pid})" if entry.node else ""
    task = f"{entry.task}[{entry.task_id}]" if entry.task_id else entry.task
    return f"{_moment(entry.began)[11:]} {task}{where}: {_ending(entry)}{seconds}{waited}{holder}"


def _row(entry: Entry) -> str:
    seconds = f"{entry.ended - entry.began:.3f}" if entry.ran else ""
    waited = f"{entry.waited:.3f}" if entry.waited >= 0.0005 else ""
    where = f"{entry.node} ({entry.pid})" if entry.node else str(entry.pid)
    cells = [
        f"<td>{_moment(entry.began)}</td>",
        f'<td class="n">{seconds}</td>',
        f"<td>{escape(entry.task)}</td>",
        f"<td>{escape(_ending(entry))}</td>",
        f'<td class="n">{waited}</td>',
        *(f"<td><code>{escape(text)}</code></td>" for text in (entry.task_id or "", where, entry.holder or "")),
        f"<td>{escape(entry.label)}</td>",
        f"<td><code>{escape(entry.key)}</code></td>",
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _ending(entry: Entry) -> str:
    if entry.kind == "duplicate":
        return f"duplicate ({entry.outcome})"
    return entry.outcome.lower() if entry.ran else entry.kind


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=timezone.utc).isoformat(sep=" ", timespec="milliseconds")[:23]
