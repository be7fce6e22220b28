"""The page that shows what happened: everything, once, and nothing that a task's name could smuggle in."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from celery_singleton_lock.holder import Holder
from celery_singleton_lock.journal.timeline import (
    OPEN,
    Window,
    beside_each_other,
    page,
    running,
)
from celery_singleton_lock.journal_entry import CRASHED, KINDS, LOST, Entry, ending, seconds
from celery_singleton_lock.stores.base import Held

WINDOW = Window(1_000_000.0, 1_000_600.0)


def run(began: float, ended: float, *, waited: float = 0.0, outcome: str = "SUCCESS", **more: Any) -> Entry:
    key = "p:1:{shop.report:abcdef}"
    entry = Entry("run", "shop.report", key, "the-id", "one@web", 7, began, ended, waited, outcome)
    return entry._replace(**more)


class Balanced(HTMLParser):
    """Fails if a tag is closed that was not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "input", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(text: str) -> Balanced:
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    return parser


def bars(text: str) -> list[tuple[str, float, float]]:
    """The class, the beginning and the width of each bar, in percent."""
    found = re.findall(r'<rect class="(\w+)" x="([\d.]+)%" width="([\d.]+)%"', text)
    return [(tone, float(x), float(width)) for tone, x, width in found]


def signs(text: str) -> list[tuple[str, float, str]]:
    found = re.findall(r'<text class="(\w+)" x="([\d.]+)%"[^>]*>(.)<', text)
    return [(tone, float(x), sign) for tone, x, sign in found]


def test_run_is_drawn_at_its_time() -> None:
    text = page("Locks", [run(1_000_060.0, 1_000_090.0, waited=30.0)], WINDOW)
    assert bars(text) == [("wait", 5.0, 5.0), ("good", 10.0, 5.0)]
    assert "1 ran" in text
    parsed(text)


def test_run_that_exceeds_the_window_is_cut_off() -> None:
    text = page("Locks", [run(999_000.0, 1_000_060.0), run(1_000_540.0, 2_000_000.0)], WINDOW)
    assert bars(text) == [("good", 0.0, 10.0), ("good", 90.0, 10.0)]


def test_shortest_run_can_be_seen() -> None:
    ((_, _, width),) = bars(page("Locks", [run(1_000_060.0, 1_000_060.0)], WINDOW))
    assert width > 0


def crashed(began: float, ended: float) -> Entry:
    """Its process died, and somebody freed its lock at the end."""
    return run(began, ended, kind="free", outcome=CRASHED, label="tenant=7")


def test_crashed_run_is_a_bar_that_ends_in_a_dagger() -> None:
    text = page("Locks", [run(1_000_000.0, 1_000_030.0), crashed(1_000_060.0, 1_000_120.0)], WINDOW)
    assert bars(text)[1:] == [("lost", 10.0, 10.0)]
    assert signs(text) == [("lost", 20.0, "†")]
    assert "shop.report[the-id] on one@web (pid 7): crashed: its process died" in text
    assert ", after 60 s" in text
    assert text.count('<td role="cell" class="lane">') == 1
    assert '>shop.<wbr>report <span class="sub">tenant=7</span>' in text
    assert "1 crashed" in text
    parsed(text)


def test_crash_that_an_older_version_wrote_is_a_mark() -> None:
    older = Entry("free", "shop.report", "p:1:{shop.report:abcdef}", None, None, 7, 1_000_060.0, 1_000_060.0)
    text = page("Locks", [older], WINDOW)
    assert (bars(text), signs(text)) == ([], [("lost", 10.0, "†")])


def test_wait_of_a_crashed_run_is_not_drawn_over_the_run_before_it() -> None:
    """Only the time when it asked for the lock is known."""
    text = page("Locks", [run(1_000_000.0, 1_000_060.0), crashed(1_000_030.0, 1_000_120.0)], WINDOW)
    assert bars(text)[1:] == [("wait", 5.0, 5.0), ("lost", 10.0, 10.0)]
    assert 'height="24"' in text, "one row"


@pytest.mark.parametrize(
    ("value", "text"), [(0.00144, "1.4 ms"), (0.201, "201 ms"), (2.361, "2.36 s"), (1234.5, "20 min")]
)
def test_seconds_have_a_unit_that_can_be_read(value: float, text: str) -> None:
    assert seconds(value) == text


def test_each_kind_and_outcome_has_words() -> None:
    assert {kind: ending(run(1.0, 2.0, kind=kind, outcome="")).text for kind in KINDS if kind != "run"}
    for outcome, tone in (("SUCCESS", "good"), ("FAILURE", "bad"), ("RETRY", "again"), (LOST, "lost"), ("ODD", "bad")):
        assert ending(run(1.0, 2.0, outcome=outcome)).tone == tone
    assert (
        ending(run(1.0, 2.0, kind="duplicate", outcome="replace")).text != ending(run(1.0, 2.0, kind="duplicate")).text
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_in_the_chart_and_in_the_table(kind: str) -> None:
    text = page("Locks", [run(1_000_060.0, 1_000_060.5, kind=kind, holder="other")], WINDOW)
    assert len(bars(text) + signs(text)) == 1
    assert text.count("<tr><td>") == 1
    ((_, sign),) = [(tone, sign) for tone, _, sign in signs(text)] or [("", "")]
    assert not sign or f">{sign}</b>" in text, "it is in the legend"
    parsed(text)


def test_each_key_has_a_lane_that_begins_with_the_task() -> None:
    keys = ["p:1:{shop.report:1}", "p:1:{shop.report:2}", "p:1:{shop.sync:1}"]
    text = page("Locks", [run(1_000_000.0 + n, 1_000_001.0 + n, key=key) for n, key in enumerate(keys * 2)], WINDOW)
    assert text.count('<td role="cell" class="lane">') == 3
    assert re.findall(r'title="(p:[^"]+)">(shop\.<wbr>\w+) ', text) == [
        *zip(keys, ("shop.<wbr>report", "shop.<wbr>report", "shop.<wbr>sync"), strict=True)
    ]


def test_overlapping_runs_have_separate_rows() -> None:
    """They come with `lock_limit`; a copy that did not run is in the row of the first run."""
    entries = [run(1.0, 5.0), run(2.0, 4.0), run(3.0, 9.0), run(4.0, 6.0), run(5.0, 7.0), run(5.5, 5.5, kind="skip")]
    lanes = [[entry.began for entry in lane] for lane in beside_each_other(entries)]
    assert lanes == [[1.0, 5.0, 5.5], [2.0, 4.0], [3.0]]


def test_names_are_text_and_not_markup() -> None:
    evil = '"><script>alert(1)</script>$title'
    more = {"task": evil, "key": f"p:1:{{{evil}:1}}", "task_id": evil, "node": evil}
    entry = run(1_000_060.0, 1_000_061.0, outcome=evil, **more)
    text = page(evil, [entry, entry._replace(kind="skip", holder=evil, holder_node=evil)], WINDOW)
    assert "script" not in parsed(text).seen
    assert "<script" not in text


def test_many_runs_are_drawn_and_their_table_is_folded() -> None:
    many = [run(1_000_000.0 + n / 10, 1_000_000.05 + n / 10, key=f"p:1:{{shop.report:{n % 50}}}") for n in range(5000)]
    text = page("Locks", many, WINDOW)
    assert len(bars(text)) == 5000
    assert "<details>" in text
    assert "<details open>" in page("Locks", many[:OPEN], WINDOW)
    assert len(text) < 5_000_000


def test_empty_result_is_reported_as_such() -> None:
    assert "Nothing happened" in page("Locks", [], WINDOW)


def test_page_is_self_contained() -> None:
    text = page("Locks", [run(1_000_060.0, 1_000_090.0)], WINDOW)
    assert not re.search(r"(src|href)=|url\(|@import|https?://", text)


def test_held_lock_is_shown_as_a_running_task() -> None:
    holder = Holder("the-id", 0, "one@web", 7, 1_000_500.0)
    entry = running("p:1:{shop.report:1}", Held(holder, "o", 20.0), 1_000_600.0)
    assert entry is not None
    assert (entry.task, entry.began, entry.ended) == ("shop.report", 1_000_500.0, 1_000_600.0)
    assert [tone for tone, _, _ in bars(page("Locks", [entry], WINDOW))] == ["now"]
    ahead = running("p:1:{a:1}", Held(Holder("i", since=2_000_000.0, pid=1), "o", 20.0), 1_000_600.0)
    assert ahead is not None
    assert ahead.began == 1_000_600.0, "the clock of its host is ahead"


@pytest.mark.parametrize(
    "held", [Held(None, "o", 1.0), Held(Holder("i"), "o", 1.0), Held(Holder("i", ttl=30.0), "o", 60.0)]
)
def test_lock_without_a_running_task_is_not_a_run(held: Held) -> None:
    """A stranger's lock, a lock that is kept between two attempts, or the lock of a message."""
    assert running("p:1:{a:1}", held, 1_000_600.0) is None
