"""The timeline as lanes of bars, in the coordinates of a picture that a script can move.

A bar has its place in time, not in the window: the window is what moves. So a lane stays the same until something
happens in it, and must be sent again only then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from celery_singleton_lock.diagnosis.held import HeldLock
from celery_singleton_lock.journal.timeline import RUNNING, in_words, running, without_waits
from celery_singleton_lock.journal_entry import CRASHED, LOST, REFUSALS, STOPPED, SUPERSEDED, Entry
from celery_singleton_lock.keys.key import name_in
from celery_singleton_lock.web.snapshot import Snapshot

#: The height of a row, in units.
HEIGHT = 10

#: Seconds after which the coordinates start from zero again: a browser counts them in single precision.
ERA = 3600.0

#: The most rows of a lane, for locks with several holders.
MOST_ROWS = 8

#: The most bars and marks of a lane: the latest.
MOST_BARS = 200


@dataclass(frozen=True, slots=True)
class Bar:
    """A run, or the wait before it; `kind` is its class in the style sheet."""

    kind: str
    x: float
    width: float
    row: int
    title: str

    @property
    def top(self) -> float:
        """Where it is in its row. A wait is a line below the bars: another run is in the same row meanwhile."""
        return HEIGHT - 0.8 if self.kind == "wait" else 2.0

    @property
    def height(self) -> float:
        return 0.4 if self.kind == "wait" else HEIGHT - 4.0


@dataclass(frozen=True, slots=True)
class Mark:
    """A copy that did not run."""

    kind: str
    x: float
    title: str


@dataclass(frozen=True, slots=True)
class Lane:
    """What happened under one key."""

    key: str
    name: str
    label: str
    bars: Sequence[Bar]
    marks: Sequence[Mark]
    rows: int
    summary: str


@dataclass(frozen=True, slots=True)
class Axis:
    """The window, in the picture's coordinates: seconds since `origin`."""

    origin: float
    since: float
    span: float


def axis(now: float, minutes: float) -> Axis:
    origin = now // ERA * ERA
    return Axis(origin, round(now - minutes * 60 - origin, 1), minutes * 60)


@dataclass(slots=True)
class Happened:
    """What happened under one key, before it is drawn: of thousands of keys, only one page is drawn.

    Attributes:
        key: the key of the lock.
        entries: its entries in the journal.
        locks: its holds now.
    """

    key: str
    entries: list[Entry] = field(default_factory=list)
    locks: list[HeldLock] = field(default_factory=list)

    @property
    def label(self) -> str:
        labels = (*(it.holder.label for it in self.locks), *(it.label for it in reversed(self.entries)))
        return next(filter(None, labels), "") or short(self.key)

    @property
    def latest(self) -> float:
        """When the latest event began."""
        return max(*(it.began for it in self.entries), *(it.holder.since for it in self.locks), 0.0, 0.0)


def happened(snapshot: Snapshot, minutes: float) -> list[Happened]:
    """The keys under which something happened in the last minutes, the latest first."""
    since = snapshot.now - minutes * 60
    found: dict[str, Happened] = {}
    for entry in snapshot.entries:
        if entry.ended >= since:
            found.setdefault(entry.key, Happened(entry.key)).entries.append(entry)
    for lock in snapshot.locks:
        if lock.holder.pid and not lock.is_queued:
            found.setdefault(lock.key, Happened(lock.key)).locks.append(lock)
    return sorted(found.values(), key=lambda it: (-it.latest, it.key))


def lane_of(what: Happened, snapshot: Snapshot, minutes: float) -> Lane:
    """What happened under one key, drawn."""
    origin = axis(snapshot.now, minutes).origin
    now = [run for it in what.locks if (run := running(it.key, it.held, snapshot.now)) is not None]
    entries = without_waits(sorted([*what.entries, *now], key=lambda it: it.began))[-MOST_BARS:]
    runs = [entry for entry in entries if entry.ran]
    others = [entry for entry in entries if not entry.ran]
    rows = _rows(runs)
    bars = [bar for run, row in zip(runs, rows, strict=True) for bar in _bars(run, row, origin)]
    marks = [Mark(_kind(it), round(it.began - origin, 2), in_words(it)) for it in others]
    marks += [Mark("freed", round(it.ended - origin, 2), in_words(it)) for it in runs if it.outcome == CRASHED]
    return Lane(what.key, name_in(what.key), what.label, bars, marks, max(rows, default=0) + 1, _summary(runs, others))


def short(key: str) -> str:
    """The beginning of a key's digest, for keys without a label."""
    return key.rpartition(":")[2].rstrip("}")[:12] or key[:12]


def _rows(runs: Sequence[Entry]) -> list[int]:
    """The row of each run, so that simultaneous runs are in different rows."""
    free_at: list[float] = []
    rows = []
    for run in runs:
        row = next((row for row, free in enumerate(free_at) if free <= run.began), len(free_at))
        if row == len(free_at) and row < MOST_ROWS:
            free_at.append(0.0)
        row = min(row, MOST_ROWS - 1)
        free_at[row] = float("inf") if run.outcome == RUNNING else run.ended
        rows.append(row)
    return rows


def _bars(run: Entry, row: int, origin: float) -> Iterator[Bar]:
    x = round(run.began - origin, 2)
    # While it runs, no duration, which changes all the time.
    is_running = run.outcome == RUNNING
    title = f"{run.task or 'held'}[{run.task_id or '-'}] on {run.node}: {RUNNING}" if is_running else in_words(run)
    if run.waited >= 0.05:
        yield Bar("wait", round(x - run.waited, 2), round(run.waited, 2), row, title)
    if is_running:
        # Its bar goes beyond the picture's edge, which is now.
        yield Bar("now", x, 10 * ERA, row, title)
        return
    kinds = {"SUCCESS": "ran", "RETRY": "again", **dict.fromkeys((LOST, STOPPED, SUPERSEDED, CRASHED), "lost")}
    yield Bar(kinds.get(run.outcome, "failed"), x, round(run.ended - run.began, 2), row, title)


def _kind(entry: Entry) -> str:
    if entry.kind == "free":
        return "freed"
    return "refused" if entry.kind in REFUSALS else "copy"


def _summary(runs: Iterable[Entry], others: Iterable[Entry]) -> str:
    """The same in words, for screen readers."""
    runs, kinds = [*runs], [_kind(it) for it in others]
    now, died = (sum(run.outcome == outcome for run in runs) for outcome in (RUNNING, CRASHED))
    counts = (
        (now, "running now"),
        (len(runs) - now, "run" if len(runs) - now == 1 else "runs"),
        (died, "of these died"),
        (kinds.count("refused"), "refused"),
        (kinds.count("copy"), "copies, duplicates or retries"),
        (kinds.count("freed"), "locks freed after a death"),
    )
    return ", ".join(f"{count} {what}" for count, what in counts if count)
