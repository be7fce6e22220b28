"""Which task held which lock and when: a picture with a lane for each key, and a page of HTML that is one file."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from importlib.resources import files
from string import Template

from celery_singleton_lock.journal_entry import CRASHED, REFUSED, RUNNING, Entry, ending, seconds
from celery_singleton_lock.keys.key import name_in
from celery_singleton_lock.stores.base import Held

#: The table is open from the start if it has at most this many rows.
OPEN = 100

#: The number of marks on the axis.
TICKS = 4

#: The height of a row, and of a bar in it, in pixels. Signs are above the bars, waits below.
ROW, BAR = 24, 10

#: The part of the window that the shortest bar takes, and the shortest wait that is drawn.
SHORTEST, VISIBLE = 0.001, 0.0005

_LEGEND = {
    "good": "ran",
    "bad": "failed",
    "again": "to be retried",
    "lost": "lost its lock, was stopped, or crashed",
    "now": "running",
    "wait": "waited",
}
_SIGNS = (
    *(("bad", REFUSED, "refused"), ("again", "↻", "copy, or retry"), ("again", "=", "joined")),
    *(("again", "»", "superseded"), ("again", "≡", "duplicate call"), ("lost", "†", "crashed; its lock was freed")),
)


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
        limit=2 if held.shared else 1,
        label=holder.label,
    ).cleaned()


def lanes(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """The entries of each key in order; the key whose entry began first is on top.

    Each run begins when it had the lock. Of a run that has not ended, or that crashed, only the time when it asked for
    the lock is known. With `lock_wait` that may be before the end of the run before it; until then it waited.
    """
    found: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in sorted(entries, key=lambda it: it.began):
        found[entry.key].append(entry)
    return {
        key: sorted((_without_wait(entry, its) for entry in its), key=lambda it: it.began) for key, its in found.items()
    }


def picture(lanes: Mapping[str, Sequence[Entry]], window: Window, link: Callable[[str], str] | None = None) -> str:
    """A table of HTML with a lane for each key; needs page.css.

    Args:
        lanes: the entries of each key, as `lanes` makes them.
        window: the time that is shown.
        link: makes the address of the page about a key.
    """
    rows = "\n".join(_lane(key, entries, window, link) for key, entries in lanes.items())
    none = '<tr role="row" class="nothing"><td role="cell" colspan="2">Nothing happened in this time.</td></tr>'
    legend = [
        f'<li><svg width="18" height="12"><rect class="{tone}" x="1" width="16" {_place(tone, -10)}/></svg> {text}</li>'
        for tone, text in _LEGEND.items()
    ]
    legend += [f'<li><b class="{tone}">{sign}</b> {text}</li>' for tone, sign, text in _SIGNS]
    return (
        '<div class="scroll"><table role="table" class="lanes"><thead role="rowgroup" data-live="axis"><tr role="row">'
        '<th scope="col" role="columnheader">lock</th>'
        f'<th scope="col" role="columnheader">{_axis(window)}</th></tr></thead>'
        f'<tbody role="rowgroup" data-live="lanes">\n{rows or none}\n</tbody></table></div>\n'
        f'<ul class="legend" aria-label="What the colours and signs mean">{"".join(legend)}</ul>'
    )


def page(title: str, entries: Sequence[Entry], window: Window) -> str:
    """The whole page, with all entries in a table."""
    here = files(__package__)
    counts = Counter(ending(entry).text for entry in entries)
    parts = "; ".join(f"{count} {what}" for what, count in counts.most_common())
    return Template(here.joinpath("timeline.html").read_text(encoding="utf-8")).substitute(
        title=escape(title),
        style=here.joinpath("page.css").read_text(encoding="utf-8"),
        summary=escape(f"{moment(window.since)} to {moment(window.until)} UTC: {parts or 'nothing'}"),
        picture=picture(lanes(entries), window),
        open=" open" if len(entries) <= OPEN else "",
        count=len(entries),
        rows="\n".join(_row(entry) for entry in sorted(entries, key=lambda it: it.began)),
    )


def beside_each_other(entries: Sequence[Entry]) -> list[list[Entry]]:
    """The entries of one key, in the smallest number of rows in which no run is drawn over another.

    With `lock_limit` several run at once; otherwise a second row means an overlap.
    """
    rows: list[list[Entry]] = [[]]
    ends = [float("-inf")]
    for entry in entries:
        row = 0
        if entry.ran:
            row = next((number for number, end in enumerate(ends) if end <= entry.began), len(ends))
            if row == len(ends):
                rows.append([])
                ends.append(entry.ended)
            ends[row] = entry.ended
        rows[row].append(entry)
    return rows


def in_words(entry: Entry) -> str:
    """All about an entry, in one line."""
    on_node = f" on {entry.holder_node}" if entry.holder_node else ""
    holder = f", held by {entry.holder}{on_node}" if entry.holder else ""
    waited = f", waited {seconds(entry.waited)}" if entry.waited >= 0.005 else ""
    after = "after" if entry.outcome == CRASHED else "for"
    lasted = f", {after} {seconds(entry.ended - entry.began)}" if entry.ran else ""
    where = f" on {entry.node} (pid {entry.pid})" if entry.node else ""
    task = f"{entry.task}[{entry.task_id}]" if entry.task_id else entry.task
    return f"{moment(entry.began)[11:]} {task}{where}: {ending(entry).text}{lasted}{waited}{holder}"


def moment(seconds: float) -> str:
    """A point in time in UTC, in ISO 8601 but with a space for the T."""
    return datetime.fromtimestamp(seconds, tz=timezone.utc).isoformat(sep=" ", timespec="milliseconds")[:23]


def _without_wait(entry: Entry, entries: Sequence[Entry]) -> Entry:
    if entry.outcome not in (RUNNING, CRASHED) or entry.limit != 1:
        return entry
    before = [it.ended for it in entries if it.ran and it is not entry and entry.began < it.ended <= entry.ended]
    began = max(before, default=entry.began)
    return entry._replace(began=began, waited=began - entry.began)


def _axis(window: Window) -> str:
    shares = [number / TICKS for number in range(TICKS)]
    texts = [moment(window.since + (window.until - window.since) * share)[11:19] for share in shares]
    ticks = [f'<text x="{share:.0%}" y="13">{text}</text>' for share, text in zip(shares, texts, strict=True)]
    return f'<svg class="axis" height="{ROW}">{"".join(ticks)}</svg>'


def _lane(key: str, entries: Sequence[Entry], window: Window, link: Callable[[str], str] | None) -> str:
    name = escape(name_in(key)).replace(".", ".<wbr>").replace("_", "_<wbr>")  # Where it may be broken.
    if link is not None:
        name = f'<a href="{escape(link(key))}">{name}</a>'
    label = escape(next((it.label for it in reversed(entries) if it.label), ""))
    rows = beside_each_other(entries)
    drawn = "".join(part for row, its in enumerate(rows) for it in its for part in _drawn(it, row * ROW, window))
    counts = Counter(ending(entry).text for entry in entries)
    summary = escape("; ".join(f"{count} {what}" for what, count in counts.most_common()))
    return (
        f'<tr role="row"><th scope="row" role="rowheader" title="{escape(key)}">{name} '
        f'<span class="sub">{label}</span></th><td role="cell" class="lane">'
        f'<svg role="img" aria-label="{summary}" height="{ROW * len(rows)}">{drawn}</svg></td></tr>'
    )


def _drawn(entry: Entry, top: int, window: Window) -> Iterator[str]:
    """A run is a bar, its wait a line, since another run is in the same row meanwhile; any other copy is a sign."""
    shown, title = ending(entry), f"<title>{escape(in_words(entry))}</title>"
    at, end = window.share(entry.began), window.share(entry.ended)
    if entry.ran:
        asked = window.share(entry.began - entry.waited)
        if at - asked > VISIBLE:
            yield f'<rect class="wait" x="{asked:.3%}" width="{at - asked:.3%}" {_place("wait", top)}>{title}</rect>'
        width = max(end - at, SHORTEST)
        yield f'<rect class="{shown.tone}" x="{at:.3%}" width="{width:.3%}" {_place(shown.tone, top)}>{title}</rect>'
    if shown.sign:
        yield f'<text class="{shown.tone}" x="{end if entry.ran else at:.3%}" y="{top + 10}">{shown.sign}{title}</text>'


def _place(tone: str, top: int) -> str:
    """The place of a bar in its row."""
    return f'y="{top + 22}" height="1"' if tone == "wait" else f'y="{top + 11}" height="{BAR}"'


def _row(entry: Entry) -> str:
    lasted = seconds(entry.ended - entry.began) if entry.ran else ""
    waited = seconds(entry.waited) if entry.waited >= 0.0005 else ""
    where = f"{entry.node} ({entry.pid})" if entry.node else str(entry.pid)
    cells = [
        f"<td>{moment(entry.began)}</td>",
        f"<td>{escape(entry.task)}</td>",
        f"<td>{escape(entry.label)}</td>",
        f'<td class="{ending(entry).tone}">{escape(ending(entry).text)}</td>',
        f'<td class="n">{lasted}</td>',
        f'<td class="n">{waited}</td>',
        *(f"<td><code>{escape(it or '')}</code></td>" for it in (entry.task_id, where, entry.holder, entry.key)),
    ]
    return f"<tr>{''.join(cells)}</tr>"
