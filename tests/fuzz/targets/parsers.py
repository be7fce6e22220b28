"""What is read from Redis, from a message or from another process, before anything is done with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from celery_singleton_lock import cleaned
from celery_singleton_lock.diagnosis import peers
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.journal import counts
from celery_singleton_lock.journal.timeline import Window, page
from celery_singleton_lock.journal_entry import Entry
from celery_singleton_lock.stores.base import Record
from celery_singleton_lock.stores.redis import lock_answers
from celery_singleton_lock.task import ends
from celery_singleton_lock.task.reports import Report
from tests.fuzz.choices import Case, Choices

HOLDER = ["91c086f90ac1559cf322eff72d4f12ab", "72e6e973-b65f", 0, "w1@host", 18193, 1795344209.8, 0, "h/1/2", 30.0, 5]
ENTRY = ["run", "t", "p:1:{t:0}", "id", "n", 7, 5.0, 6.0, 0.5, "SUCCESS", 3, 2, 4, "other", "there", 1.0, "tick", "n=7"]
RECORD = ["SUCCESS", 3600.0, True, False]
VALUE = {"a": [1, {"b": None}], "c": 1.5}
ERROR = ["builtins", "ValueError", ["a", 1], {"x": 1}]
REPORT = ["0" * 32, "p:1:{t:0}", 30.0, 1, "0" * 32, "tenant=7"]
STANDING = {"version": "1", "enabled": True, "backend": "redis://h", "prefix": "p"}

#: When an entry was written.
NOW = 10.0


def is_clean(text: str, most: int = cleaned.MAX_BYTES) -> bool:
    return text.isprintable() and len(text.encode()) <= most


def _holder(choices: Choices) -> None:
    content = choices.written(HOLDER)
    holder = Holder.loads(content)
    if holder is None:
        return
    assert all(map(is_clean, (holder.task_id or "", holder.node or "", holder.process, holder.sending)))
    assert Holder.loads(holder.dumps(holder.ttl)) == holder
    lock_answers.parse_held(b"0" * 32 + content, choices.below(9) - 2)


def _entry(choices: Choices) -> None:
    entry = Entry.loads(choices.written(ENTRY), NOW)
    if entry is None:
        return
    again = Entry.loads(entry.dumps(NOW), NOW)
    assert again is not None
    assert again._replace(began=entry.began, ended=entry.ended) == entry
    shown = page("Locks", [entry], Window(0.0, 10.0))
    assert "\x1b" not in shown
    assert "<script>" not in shown.partition("<body")[2]
    shown.encode()
    assert all(is_clean(count[1]) for count, _ in counts.of(entry))


def _record(choices: Choices) -> None:
    content = choices.written(RECORD) + b"\n" + choices.written(VALUE)
    ended, age = ends.read(Record("m", choices.spoiled(content), choices.below(99) * 1.0))
    assert is_clean(ended.state)
    assert 0 <= age <= cleaned.MAX_SECONDS


def _kept(choices: Choices) -> None:
    """Reading finds an end, or nothing; nothing else happens."""
    ends.end_of(ends.Outcome("SUCCESS", choices.written(VALUE)))


def _kept_error(choices: Choices) -> None:
    end = ends.end_of(ends.Outcome("FAILURE", choices.written(ERROR)))
    assert end is None or isinstance(end.error, Exception)


def _report(choices: Choices) -> None:
    report = Report.loads(choices.written(REPORT).replace(b"\n", b""))
    assert report is None or Report.loads(report.dumps()) == report


def _counts(choices: Choices) -> None:
    found = {choices.written(["runs", "t", "SUCCESS"]).decode(errors="replace"): choices.below(9)}
    for count in counts.read(found):
        assert all(map(is_clean, count))


def _peer(choices: Choices) -> None:
    known = peers._known(choices.mutated(STANDING))
    peer = peers.Peer("n", frozenset({"t"}), frozenset(), known)
    for finding in peers.of_peer(peer, frozenset({"t"}), STANDING):
        assert len(finding.text) < 2000
        assert cleaned.printable(finding.text).isprintable()


def _cleaned(choices: Choices) -> None:
    value = choices.value()
    found = cleaned.text(value)
    assert is_clean(found)
    assert cleaned.text(found) == found
    assert cleaned.value_shown(value).isprintable()
    assert is_clean(cleaned.line(value), cleaned.MAX_LINE_BYTES)
    assert 0 <= cleaned.count(value) <= cleaned.MAX_COUNT
    assert 0 <= cleaned.seconds(value) <= cleaned.MAX_SECONDS
    cleaned.whole(choices.content())
    json.dumps([cleaned.seconds(value)], allow_nan=False)


_CASES = (_holder, _entry, _record, _kept, _kept_error, _report, _counts, _peer, _cleaned)


@contextmanager
def cases() -> Iterator[Case]:
    yield lambda choices: choices.pick(_CASES)(choices)
