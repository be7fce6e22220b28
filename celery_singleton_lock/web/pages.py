"""What each page shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from markupsafe import Markup

from celery_singleton_lock.diagnosis.held import HeldLock
from celery_singleton_lock.journal.counts import by_task
from celery_singleton_lock.journal.timeline import Window, lanes, picture, running
from celery_singleton_lock.journal_entry import CRASHED, REFUSALS, Entry
from celery_singleton_lock.keys.key import is_key, name_in, name_of_beat, shown_name, without_queue
from celery_singleton_lock.web.rendering import SORTS, Asked, address
from celery_singleton_lock.web.schedule import planned
from celery_singleton_lock.web.watch import Snapshot, Watch

T = TypeVar("T")

#: How many rows a page has, lanes a timeline, rows a table on the overview, and entries a lane.
PAGE, LANES, FEW, MOST_BARS = 50, 30, 10, 200


@dataclass(frozen=True, slots=True)
class View:
    """What a page shows.

    Attributes:
        template: the file of its template.
        title: the title of the page.
        context: the values for the template.
        status: the HTTP status.
    """

    template: str
    title: str
    context: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200


@dataclass(frozen=True, slots=True)
class Question:
    """What is known, and what a page shall show of it.

    Attributes:
        watch: looks at the locks.
        snapshot: what it saw.
        asked: the query of the page's address.
        base: the address below which the pages are.
    """

    watch: Watch
    snapshot: Snapshot
    asked: Asked
    base: str = ""

    def part(self, found: Sequence[T], size: int = PAGE) -> tuple[Sequence[T], dict[str, int]]:
        """One page of the results, and the values for the template: how many results and pages there are."""
        pages = max(-(-len(found) // size), 1)
        start = (min(self.asked.number, pages) - 1) * size
        return found[start : start + size], {"found": len(found), "pages": pages}

    def timeline(self, by_key: Mapping[str, Sequence[Entry]]) -> Markup:
        drawn = {key: entries[-MOST_BARS:] for key, entries in by_key.items()}
        window = Window(self.snapshot.now - self.asked.minutes * 60, self.snapshot.now)
        # Escaped where it was made.
        return Markup(picture(drawn, window, lambda key: address(self.base, "lock", key=key)))  # noqa: S704


def overview(question: Question) -> View:
    """The numbers of everything, and what may need attention."""
    snapshot = question.snapshot
    held = [lock for lock in snapshot.locks if not lock.is_queued and not lock.is_of_beat]
    waiting = {it.key: it.held.waiters for it in snapshot.locks}  # Each holder of a semaphore has the same waiters.
    tiles: Sequence[tuple[int, str, str, Mapping[str, str]]] = (
        (len(held), "held", "locks", {}),
        (sum(lock.is_queued for lock in snapshot.locks), "queued", "locks", {}),
        (sum(waiting.values()), "waiting", "locks", {"sort": SORTS[2]}),
        (len(snapshot.refused), "locks that refuse copies", "refused", {}),
    )
    refused = _newest(snapshot.entries, lambda it: it.kind in REFUSALS)[:FEW]
    return View(
        "overview.html", "Overview", {"tiles": tiles, "longest": sorted(held, key=_since)[:FEW], "refused": refused}
    )


def locks(question: Question) -> View:
    """The locks that are held."""
    asked, of = question.asked, question.snapshot.locks
    found = [lock for lock in of if _has(lock, asked.search)]
    if asked.sort == SORTS[1]:
        found.sort(key=_since)
    elif asked.sort == SORTS[2]:
        found.sort(key=lambda lock: -lock.held.waiters)
    shown, pages = question.part(found)
    return View("locks.html", "Locks", {"locks": shown, "sorts": SORTS, "of": len(of), **pages})


def lock(question: Question) -> View:
    """One key: its holders and its history."""
    snapshot, asked = question.snapshot, question.asked
    key = without_queue(asked.key.removesuffix(":run"))
    held = [it for it in snapshot.locks if without_queue(it.key) == key]
    entries = _newest(snapshot.entries, lambda it: without_queue(it.key) == key)
    if not (held or entries or is_key(snapshot.prefix, key)):
        return unknown("lock", asked.key)
    label = next((text for text in (*(it.holder.label for it in held), *(it.label for it in entries)) if text), "")
    shown, pages = question.part(entries)
    happened = _happened(question, lambda it: it.key == key)
    context = {
        "key": key,
        "label": label,
        "refused": snapshot.refused.get(key, 0),
        "fence": max((it.held.fence or 0 for it in held), default=0),
        "held": held,
        "entries": shown,
        "timeline": question.timeline(happened),
        **pages,
    }
    return View("lock.html", f"{name_in(key)} {label}".strip(), context)


def tasks(question: Question) -> View:
    """The counts of each task."""
    shown, pages = question.part(_counted(question.snapshot, question.asked.search))
    return View("tasks.html", "Tasks", {"tasks": shown, **pages})


def timeline(question: Question) -> View:
    """The runs, waits and refusals of the last minutes, the key with the latest on top."""
    search = question.asked.search
    found = _happened(question, lambda it: _matches(search, it.task, it.key, it.label))
    latest = sorted(found, key=lambda key: (-found[key][-1].began, key))
    shown, pages = question.part(latest, LANES)
    return View(
        "timeline.html", "Timeline", {"timeline": question.timeline({key: found[key] for key in shown}), **pages}
    )


def refused(question: Question) -> View:
    """The copies that were refused, and why."""
    snapshot, search = question.snapshot, question.asked.search
    entries = _newest(snapshot.entries, lambda it: it.kind in REFUSALS and _tells_of(it, search))
    labels = {entry.key: entry.label for entry in snapshot.entries if entry.label}
    most = sorted(snapshot.refused.items(), key=lambda item: (-item[1], item[0]))[:FEW]
    in_a_row = [(key, labels.get(key, ""), count) for key, count in most]
    shown, pages = question.part(entries)
    return View("refused.html", "Refused", {"entries": shown, "in_a_row": in_a_row, **pages})


def beat(question: Question) -> View:
    """Which beats run, and what they send next."""
    watch, snapshot = question.watch, question.snapshot
    beats = [it for it in snapshot.locks if it.name == shown_name(name_of_beat(watch.beat.name))]
    return View("beat.html", "Beat", {"beats": beats, "planned": planned(watch.app, snapshot), "name": watch.beat.name})


def search(question: Question) -> View:
    """All that contains a text: tasks, locks that are held, and what happened to copies."""
    snapshot, text = question.snapshot, without_queue(question.asked.search.removesuffix(":run"))
    entries = _newest(snapshot.entries, lambda it: _tells_of(it, text))
    held = [lock for lock in snapshot.locks if _has(lock, text)]
    shown, pages = question.part(entries)
    counted = _counted(snapshot, text)
    context = {"locks": held[:FEW], "held": len(held), "tasks": counted[:FEW], "entries": shown, **pages}
    return View("search.html", f"Search for {text}", context)


def unknown(what: str, text: str) -> View:
    """The page for something that does not exist."""
    return View("unknown.html", "Not found", {"what": what, "text": text}, status=404)


#: The pages by their addresses.
PAGES: Mapping[str, Callable[[Question], View]] = {
    "": overview,
    "locks": locks,
    "tasks": tasks,
    "timeline": timeline,
    "refused": refused,
    "beat": beat,
    "lock": lock,
    "search": search,
}

#: The pages in the menu.
MENU = ("", "locks", "tasks", "timeline", "refused", "beat")


def _counted(snapshot: Snapshot, search: str) -> list[tuple[str, Sequence[int | None], float | None]]:
    """The counts of the tasks with this text in their names."""
    held = Counter(lock.name for lock in snapshot.locks if not lock.is_queued)
    return [_of_task(it, held[it["task"]]) for it in by_task(snapshot.counts) if _matches(search, it["task"])]


def _of_task(counts: Mapping[str, Any], held: int) -> tuple[str, Sequence[int | None], float | None]:
    """A task's name, its counts in the order of the columns, and for how long it held its lock each time."""
    runs = counts["runs"]
    ran = sum(runs.values())
    refusals = sum(value for policy, value in counts["conflicts"].items() if policy in REFUSALS)
    numbers = (
        *(held, ran, runs.get("FAILURE"), runs.get(CRASHED), sum(counts["conflicts"].values()), refusals),
        *(counts["superseded"], sum(counts["duplicates"].values()), counts["losses"]),
    )
    return counts["task"], numbers, counts["held"] / ran if ran else None


def _happened(question: Question, wanted: Callable[[Entry], bool]) -> dict[str, list[Entry]]:
    """The entries of the timeline's minutes by their keys, with what runs now."""
    snapshot = question.snapshot
    since = snapshot.now - question.asked.minutes * 60
    now = (running(it.key, it.held, snapshot.now) for it in snapshot.locks if not it.is_queued)
    ended = (it for it in snapshot.entries if it.ended >= since)
    return lanes(it for it in (*ended, *now) if it is not None and wanted(it))


def _newest(entries: Sequence[Entry], wanted: Callable[[Entry], bool]) -> list[Entry]:
    return sorted(filter(wanted, entries), key=lambda it: it.began, reverse=True)


def _since(lock: HeldLock) -> float:
    """A sort key that puts the longest held locks first, in the same order at each look."""
    return float("inf") if lock.held_for is None else lock.holder.since


def _has(lock: HeldLock, search: str) -> bool:
    return _matches(search, lock.key, lock.holder.label, lock.holder.task_id, lock.holder.node)


def _tells_of(entry: Entry, search: str) -> bool:
    return _matches(search, entry.task, entry.key, entry.label, entry.task_id, entry.holder, entry.node)


def _matches(search: str, *texts: str | None) -> bool:
    wanted = search.casefold()
    return any(wanted in text.casefold() for text in texts if text)
