"""What each page shows. A page has a heading and regions of rows; a row that changes can be sent again by itself."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from markupsafe import Markup

from celery_singleton_lock.diagnosis.held import HeldLock
from celery_singleton_lock.journal.counts import by_task
from celery_singleton_lock.journal_entry import REFUSALS, Entry
from celery_singleton_lock.keys.key import is_key, name_in, shown_name, without_queue
from celery_singleton_lock.web import chart, words
from celery_singleton_lock.web.asked import SORTS, Asked
from celery_singleton_lock.web.rendering import Renderer
from celery_singleton_lock.web.schedule import planned
from celery_singleton_lock.web.snapshot import Snapshot, place_of
from celery_singleton_lock.web.watch import Watch

T = TypeVar("T")

#: The number of rows on a page, of lanes in a timeline, and of rows in each table on the overview.
PAGE, LANES, FEW = 50, 30, 10

#: How many entries of the journal a history shows.
HISTORY = 200

#: Rows of HTML by their ids.
Region = dict[str, Markup]


@dataclass(frozen=True, slots=True)
class View:
    """What a page shows.

    Attributes:
        template: the file of its template.
        title: the title of the page.
        regions: its rows, by the region's name.
        context: other values for the template.
        status: the HTTP status.
    """

    template: str
    title: str
    regions: Mapping[str, Region] = field(default_factory=dict)
    context: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200


#: Makes a page.
Maker = Callable[[Watch, Snapshot, Asked, Renderer], View]


def overview(_: Watch, snapshot: Snapshot, __: Asked, render: Renderer) -> View:
    """The numbers of everything, and what may need attention."""
    held = [lock for lock in snapshot.locks if not lock.is_queued]
    regions = {
        "tiles": _tiles(snapshot, held, render),
        "longest": _lock_rows("longest", sorted(held, key=_since)[:FEW], snapshot, render),
        "refusals": _copies("refusals", _newest(_refused(snapshot.entries), FEW), render),
    }
    return View("overview.html", "Overview", regions)


def locks(_: Watch, snapshot: Snapshot, asked: Asked, render: Renderer) -> View:
    """The locks that are held."""
    found = [lock for lock in snapshot.locks if _has(lock, asked.search)]
    if asked.sort == SORTS[1]:
        found.sort(key=_since)
    elif asked.sort == SORTS[2]:
        found.sort(key=lambda lock: -lock.held.waiters)
    shown, pages = _part(found, asked.number, PAGE)
    context = {"pages": pages, "sorts": SORTS, "found": len(found), "of": len(snapshot.locks)}
    return View("locks.html", "Locks", {"locks": _lock_rows("locks", shown, snapshot, render)}, context)


def lock(_: Watch, snapshot: Snapshot, asked: Asked, render: Renderer) -> View:
    """One key: its holders and its history."""
    key = without_queue(asked.key.removesuffix(":run"))
    held = [it for it in snapshot.locks if without_queue(it.key) == key]
    entries = [entry for entry in snapshot.entries if without_queue(entry.key) == key]
    if not (held or entries or is_key(snapshot.prefix, key)):
        return unknown("lock", asked.key)
    label = next((it.holder.label for it in held if it.holder.label), "")
    label = label or next((entry.label for entry in reversed(entries) if entry.label), "")
    axis = chart.axis(snapshot.now, asked.minutes)
    drawn = [it for it in chart.happened(snapshot, asked.minutes) if it.key == key]
    regions = {
        "held": _lock_rows("held", held, snapshot, render),
        "lanes": _lanes(drawn, snapshot, asked, render),
        "history": _copies("history", _newest(entries, HISTORY), render),
    }
    context = {
        "key": key,
        "label": label,
        "name": name_in(key),
        "refused": snapshot.refused.get(key, 0),
        "fence": max((it.held.fence or 0 for it in held), default=0),
        "axis": axis,
        "held": held,
        "count": len(entries),
    }
    return View("lock.html", label or name_in(key), regions, context)


def tasks(_: Watch, snapshot: Snapshot, asked: Asked, render: Renderer) -> View:
    """The counts of each task."""
    held = Counter(lock.name for lock in snapshot.locks if not lock.is_queued)
    found = [counts for counts in by_task(snapshot.counts) if asked.search.casefold() in counts["task"].casefold()]
    shown, pages = _part(found, asked.number, PAGE)
    rows = [(counts["task"], {**_of_task(counts), "held": held[counts["task"]]}) for counts in shown]
    regions = {"tasks": _region("tasks", "task", rows, render)}
    return View("tasks.html", "Tasks", regions, {"pages": pages, "found": len(found)})


def task(watch: Watch, snapshot: Snapshot, asked: Asked, render: Renderer) -> View:
    """One task: its counts, its locks, and what happened to its copies."""
    counts = next((it for it in by_task(snapshot.counts) if it["task"] == asked.name), None)
    entries = [entry for entry in snapshot.entries if entry.task == asked.name]
    lock_name = getattr(watch.app.tasks.get(asked.name), "lock_name", None)
    names = {shown_name(asked.name), *([] if lock_name is None else [shown_name(str(lock_name))])}
    held = [it for it in snapshot.locks if it.name in names]
    if counts is None and not entries and not held and asked.name not in watch.app.tasks:
        return unknown("task", asked.name)
    regions = {
        "held": _lock_rows("held", held[:PAGE], snapshot, render),
        "history": _copies("history", _newest(entries, HISTORY), render),
    }
    context = {
        "name": asked.name,
        "counts": [] if counts is None else _in_words(counts),
        "held": len(held),
        "lock_names": sorted(names),
        "count": len(entries),
    }
    return View("task.html", asked.name, regions, context)


def message(_: Watch, snapshot: Snapshot, asked: Asked, render: Renderer) -> View:
    """The task with one id: its locks, and what happened to its copies and to those that met it."""
    held = [it for it in snapshot.locks if it.holder.task_id == asked.id]
    entries = [entry for entry in snapshot.entries if asked.id in (entry.task_id, entry.holder)]
    regions = {
        "held": _lock_rows("held", held, snapshot, render),
        "history": _copies("history", _newest(entries, HISTORY), render),
    }
    if not asked.id or not (held or entries):
        # With its regions: the page may be open while a task has ended and is not yet in the journal.
        return replace(unknown("task id", asked.id), regions=regions)
    return View("message.html", f"Task {asked.id}", regions, {"id": asked.id, "count": len(entries)})


def timeline(_: Watch, snapshot: Snapshot, asked: Asked, render: Renderer) -> View:
    """The runs, waits and refusals of the last minutes."""
    axis = chart.axis(snapshot.now, asked.minutes)
    found = [it for it in chart.happened(snapshot, asked.minutes) if _matches(asked.search, it.key, it.label)]
    shown, pages = _part(found, asked.number, LANES)
    context = {"axis": axis, "pages": pages, "found": len(found)}
    return View("timeline.html", "Timeline", {"lanes": _lanes(shown, snapshot, asked, render)}, context)


def refused(_: Watch, snapshot: Snapshot, asked: Asked, render: Renderer) -> View:
    """The copies that were refused, and why."""
    entries = [it for it in _refused(snapshot.entries) if _matches(asked.search, *_texts(it))]
    shown, pages = _part(entries[::-1], asked.number, PAGE)
    most = sorted(snapshot.refused.items(), key=lambda item: (-item[1], item[0]))
    labels = {entry.key: entry.label for entry in snapshot.entries if entry.label}
    rows = [
        (key, {"key": key, "name": name_in(key), "label": labels.get(key, ""), "count": count})
        for key, count in most[:FEW]
    ]
    in_a_row = _region("in_a_row", "in_a_row", rows, render)
    regions = {"refusals": _copies("refusals", shown, render), "in_a_row": in_a_row}
    return View("refused.html", "Refused", regions, {"pages": pages, "found": len(entries)})


def beat(watch: Watch, snapshot: Snapshot, _: Asked, render: Renderer) -> View:
    """Which beat leads, and what it sends next."""
    leaders = [it for it in snapshot.locks if it.key == watch.beat_key]
    rows = [(entry.name, {"entry": entry}) for entry in planned(watch.app, snapshot)]
    schedule = _region("schedule", "planned", rows, render)
    regions = {"leader": _lock_rows("leader", leaders, snapshot, render), "schedule": schedule}
    return View("beat.html", "Beat", regions, {"name": watch.beat.name})


def search(asked: Asked) -> str | None:
    """The page to show if the search text is the key of a lock; None if the locks must be searched."""
    return "lock" if "{" in asked.search and "}" in asked.search else None


def unknown(what: str, text: str) -> View:
    """The page for something that does not exist."""
    return View("unknown.html", "Not found", context={"what": what, "text": text}, status=404)


#: The pages that are made from a snapshot, by their addresses.
PAGES: Mapping[str, Maker] = {
    "": overview,
    "locks": locks,
    "lock": lock,
    "tasks": tasks,
    "task": task,
    "id": message,
    "timeline": timeline,
    "refused": refused,
    "beat": beat,
}

#: The menu: addresses and names.
MENU = (
    ("", "Overview"),
    ("locks", "Locks"),
    ("tasks", "Tasks"),
    ("timeline", "Timeline"),
    ("refused", "Refused"),
    ("beat", "Beat"),
    ("doctor", "Doctor"),
)


def html(view: View, page: str, asked: Asked, snapshot: Snapshot, render: Renderer, *, about: str, **more: Any) -> str:
    """The whole page; its template also gets `more`."""
    context = {
        "view": view,
        "page": page,
        "asked": asked,
        "snapshot": snapshot,
        "menu": MENU,
        "about": about,
        "framed": True,
        "stream": page in PAGES and view.status == 200,
        "can_sign_in": False,
        "allow_release": False,
        "signed_in": False,
        **more,
    }
    return render.page(view.template, {**view.context, **context})


def id_of(region: str, name: str) -> str:
    """The id of a row in its page: always a word, whatever the name contains."""
    return f"{region}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _tiles(snapshot: Snapshot, held: Sequence[HeldLock], render: Renderer) -> Region:
    queued = len(snapshot.locks) - len(held)
    waiting = {it.key: it.held.waiters for it in snapshot.locks}  # Each holder of a semaphore has the same waiters.
    tiles = (
        (len(held), "held", render.address("locks")),
        (queued, "queued", render.address("locks")),
        (
            sum(waiting.values()),
            "waiting",
            render.address("locks", sort=SORTS[2]),
        ),
        (len(snapshot.refused), "keys that refuse copies", render.address("refused")),
    )
    rows = [(caption, {"value": value, "caption": caption, "to": to}) for value, caption, to in tiles]
    return _region("tiles", "tile", rows, render)


def _lock_rows(region: str, locks: Iterable[HeldLock], snapshot: Snapshot, render: Renderer) -> Region:
    rows = [
        (
            f"{it.key} {it.slot}",
            {"lock": it, "key": without_queue(it.key), "ends_at": snapshot.ends.get(place_of(it))},
        )
        for it in locks
    ]
    return _region(region, "lock", rows, render)


def _copies(region: str, entries: Iterable[Entry], render: Renderer) -> Region:
    rows = [(repr(it), {"entry": it, "what": words.ending(it), "tone": words.tone(it)}) for it in entries]
    return _region(region, "copy", rows, render)


def _lanes(drawn: Iterable[chart.Happened], snapshot: Snapshot, asked: Asked, render: Renderer) -> Region:
    axis = chart.axis(snapshot.now, asked.minutes)
    lanes = [chart.lane_of(it, snapshot, asked.minutes) for it in drawn]
    return _region("lanes", "lane", [(lane.key, {"lane": lane, "axis": axis}) for lane in lanes], render)


def _region(region: str, kind: str, rows: Iterable[tuple[str, Mapping[str, Any]]], render: Renderer) -> Region:
    """Rows of one kind, by their ids; if there are none, one row that says so."""
    found = {}
    for name, values in rows:
        row_id = id_of(region, name)
        found[row_id] = render.row(kind, id=row_id, **values)
    none = f"{region}-none"
    return found or {none: render.row("nothing", id=none, region=region)}


def _of_task(counts: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a task's row."""
    runs = sum(counts["runs"].values())
    refusals = sum(value for policy, value in counts["conflicts"].items() if policy in REFUSALS)
    return {
        "name": counts["task"],
        "runs": runs,
        "failed": counts["runs"].get("FAILURE", 0),
        "conflicts": sum(counts["conflicts"].values()),
        "refused": refusals,
        "duplicates": sum(counts["duplicates"].values()),
        "losses": counts["losses"],
        "each": counts["held"] / runs if runs else None,
    }


def _in_words(counts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The counts of a task, by their names, without those that are zero."""
    found = []
    for name, value in counts.items():
        if isinstance(value, Mapping) and value:
            parts = ", ".join(f"{label.lower()} {count}" for label, count in sorted(value.items()))
            found.append((name.replace("_", " "), f"{sum(value.values())} ({parts})"))
        elif name in ("waited", "held"):
            found.append((f"{name}, total seconds", f"{value:.3g}"))
        elif isinstance(value, int) and value:
            found.append((name.replace("_", " "), str(value)))
    return found


def _refused(entries: Iterable[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.kind in REFUSALS]


def _newest(entries: Sequence[Entry], most: int) -> list[Entry]:
    return [*entries[-most:]][::-1]


def _part(found: Sequence[T], number: int, size: int) -> tuple[Sequence[T], int]:
    """One page of the results, and the number of pages."""
    pages = max(-(-len(found) // size), 1)
    start = (min(number, pages) - 1) * size
    return found[start : start + size], pages


def _since(lock: HeldLock) -> float:
    """A sort key that puts the longest held locks first, in the same order at each look."""
    return float("inf") if lock.held_for is None else lock.holder.since


def _has(lock: HeldLock, search: str) -> bool:
    return _matches(search, lock.key, lock.holder.label, lock.holder.task_id or "", lock.holder.node or "")


def _texts(entry: Entry) -> tuple[str, ...]:
    return entry.task, entry.key, entry.label, entry.task_id or "", entry.holder or "", entry.node or ""


def _matches(search: str, *texts: str) -> bool:
    wanted = search.casefold()
    return any(wanted in text.casefold() for text in texts)
