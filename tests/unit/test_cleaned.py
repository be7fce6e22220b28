"""Foreign input: what is kept of it is bounded, and is shown safely."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from celery_singleton_lock import cleaned
from celery_singleton_lock.errors import LockConflict, ResultLost
from celery_singleton_lock.holder import FENCE, Holder
from celery_singleton_lock.journal import counts as metrics
from celery_singleton_lock.journal.timeline import Window, page
from celery_singleton_lock.journal_entry import Entry
from celery_singleton_lock.stores.base import Record
from celery_singleton_lock.task import ends

#: Anything that a message or a value in Redis can hold.
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.just(10**400)
    | st.just("\x1b]0;x\x07\ud800"),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=10,
)


def is_clean(text: str, *, most: int = cleaned.MAX_BYTES) -> bool:
    return text.isprintable() and len(text.encode()) <= most


@given(anything)
@example("é" * 10_000)
def test_text_is_printable_and_bounded(value: object) -> None:
    found = cleaned.text(value)
    assert is_clean(found)
    assert cleaned.text(found) == found, "a clean text does not change"
    assert cleaned.printable(value).isprintable()
    assert cleaned.value_shown(value).isprintable()


def test_values_that_python_cannot_print_are_shown() -> None:
    for value in (10**5000, json.loads("[" * 900 + "]" * 900)):
        assert is_clean(cleaned.text(value))


@given(st.text(), st.text())
def test_long_texts_are_distinguished(one: str, other: str) -> None:
    one, other = cleaned.printable(one), cleaned.printable(other)
    assert (cleaned.text("x" * 300 + one) == cleaned.text("x" * 300 + other)) == (one == other)


def test_object_without_a_repr_is_shown() -> None:
    class Rude:
        def __repr__(self) -> str:
            raise RuntimeError

    assert cleaned.text(Rude()).startswith("<Rude")


class TestHolder:
    def test_additions_of_a_later_version_are_ignored(self) -> None:
        holder = Holder("id", 1, "node", 7, 5.0, process="here", sending="first", label="tenant=7")
        found = Holder.loads(json.dumps([*json.loads(holder.dumps(3.0, fence=12)), "more"]))
        assert found == holder
        assert (found.ttl, found.label) == (3.0, "tenant=7")

    def test_fence_has_the_same_place_with_and_without_a_label(self) -> None:
        plain, labelled = Holder("id"), Holder("id", label='a "b]\\\n')
        for holder in (plain, labelled):
            assert json.loads(holder.dumps(fence=12))[FENCE] == 12
            before, behind = holder.json_around_fence(0.0).split("\n")
            assert f"{before},12{behind}" == holder.dumps(fence=12)


#: When an entry was written.
NOW = 10.0


class TestEntry:
    def test_no_html_gets_into_the_page(self) -> None:
        evil = "<script>alert(1)</script>\"'>"
        fields = ["run", evil, f"p:1:{{{evil}:0}}", evil, evil, 1, 5.0, 6.0, 0.0, evil, 1, 1, 1, evil, evil, 0.0, evil]
        fields.append(evil)
        entry = Entry.loads(json.dumps(fields), NOW)
        assert entry is not None
        assert "<script>alert" not in page("Locks", [entry], Window(0.0, 10.0))

    def test_additions_of_a_later_version_are_ignored(self) -> None:
        entry = Entry("run", "t", "k", "id", "node", 1, 2.0, 3.0)
        assert Entry.loads(json.dumps([*json.loads(entry.dumps(NOW)), "more"]), NOW) == entry

    def test_each_field_is_read_from_its_place(self) -> None:
        fields = ["run", "t", "k", "id", "node", 7, 6.0, 5.0, 0.5, "SUCCESS", 3, 2, 4, "other", "there", 1.0, "nightly"]
        fields.append("tenant=7")
        entry = Entry.loads(json.dumps(fields), NOW)
        assert entry is not None
        names = ["kind", "task", "key", "task_id", "node", "pid", "began", "ended", "waited"]
        names += [
            "outcome",
            "fence",
            "renewals",
            "limit",
            "holder",
            "holder_node",
            "holder_since",
            "scheduled",
            "label",
        ]
        shown = entry._replace(began=6.0, ended=5.0)  # Which were seconds before `NOW`.
        assert (entry.began, entry.ended) == (NOW - 6.0, NOW - 5.0)
        assert [getattr(shown, name) for name in names] == fields
        assert json.loads(entry.dumps(NOW)) == fields


def test_counts_that_look_the_same_are_added() -> None:
    counts = {'["refused_ticks", "t", "\\ud800"]': 1, '["refused_ticks", "t", "\\\\ud800"]': 2}
    assert metrics.read(counts) == {metrics.Count("refused_ticks", "t", "\\ud800"): 3}


def test_additions_of_a_later_version_to_a_record_are_ignored() -> None:
    ended = ends.Outcome("FAILURE", b"content", settled=True, mark="one of two")
    head, _, content = ended.record_of(Holder("task"), 60.0).content.partition(b"\n")
    later = b"\n".join((json.dumps([*json.loads(head), "more"]).encode(), content))
    assert ends.read(Record("message", later, 45.0)) == (ended, 15.0)


@pytest.mark.parametrize("task_id", ["\x1b[2J\x1b]0;owned\x07", "x" * 100_000, 7, {"a": 1}, "\ud800"])
def test_errors_show_a_shortened_id(task_id: object) -> None:
    for error in (LockConflict("key", task_id), ResultLost("task", task_id)):  # type: ignore[arg-type]
        assert is_clean(str(error), most=600)
