"""A message, parsed once: which ones are plain, what others wrote there, and how few functions a plain one passes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from celery.app.trace import build_tracer

import celery_singleton_lock
from celery_singleton_lock.task.message import HEADER, NO_NOTE, Message, Note, Target, Waits, sending_in
from tests.unit.deliveries import bound, request_of

OURS = {"id": "the id", "sent": "a" * 32}
JOINED = Target("another", "a sending", 0, 0, 7.0)
LOCK = Waits("singleton:lock:{key}", 1)

#: The modules of `task/` for messages that wait, that are sent with a lock, or whose body does not run.
SPECIAL = {
    "queue_lock",
    "conclude",
    "requeue",
    "sharing",
}


def parsed(put_back: object = None, *, retries: int = 0, redelivered: bool = False, **carried: Any) -> Message:
    header = {**OURS, **carried, **({} if put_back is None else {"put_back": put_back})}
    delivery_info = {"redelivered": redelivered}
    return Message.of(Context({"id": "the id", "retries": retries, "delivery_info": delivery_info, HEADER: header}))


@pytest.mark.parametrize(
    ("message", "is_plain"),
    [
        (parsed(), True),
        (parsed(call={"wait": 5}), True),
        (parsed(retries=1), True),
        (parsed(redelivered=True), False),
        (parsed(queue=["lock"]), False),
        (parsed({"retries": 0}), False),
        (parsed({"retries": 0, "arrived": 7}, retries=1), False),
    ],
)
def test_message_that_can_only_ask_for_its_lock_is_plain(message: Message, is_plain: bool) -> None:
    assert message.is_plain is is_plain


def test_what_was_put_back_is_read() -> None:
    known = {"retries": 1, "conflict": 3, "given_up": ["b" * 32], "waits": [*LOCK], "joins": [*JOINED], "since": 5.0}
    message = parsed({**known, "arrived": 7, "redelivered": True, "returned": [2, 1]}, retries=1)
    assert message.note == Note({"conflict": 3}, LOCK, 5.0, JOINED, None, ("b" * 32,), True, (2, 1))
    assert (message.was_put_back, message.may_have_begun, message.number) == (True, True, 7)
    assert message.put_back_count("conflict") == 3


def test_of_an_earlier_attempt_only_the_number_counts() -> None:
    message = parsed({"retries": 0, "conflict": 3, "redelivered": True, "arrived": 7}, retries=1)
    assert message.note == NO_NOTE
    assert (message.was_put_back, message.may_have_begun, message.number) == (False, False, 7)


@pytest.mark.parametrize(
    "nonsense",
    [
        "text",
        ["retries", 0],
        {"retries": "0", "conflict": 3},
        {"retries": 0, "conflict": -1, "unavailable": True, "arrived": "7"},
        {"retries": 0, "waits": ["key"], "joins": 7, "leader": ["x", "y", "z", None], "since": "today"},
        {"retries": 0, "waits": ["a\nkey", 1], "given_up": ["an owner", 7], "returned": [1], "redelivered": "yes"},
        {"retries": 0, "waits": ["key", 0], "given_up": 7, "arrived": 0},
    ],
)
def test_what_others_wrote_counts_as_nothing(nonsense: object) -> None:
    message = parsed(nonsense)
    assert (message.note, message.may_have_begun, message.number) == (Note({}), False, None)


def test_names_of_sendings_differ_by_each_part_of_their_message() -> None:
    """A message that was sent without this package has no random part."""

    def sending(**parts: Any) -> str:
        return Message.of(Context({"id": "the id", **parts})).sending

    chain, random = [{"options": {"task_id": "next"}}], {HEADER: OURS}
    made = [sending(), sending(root_id="r"), sending(parent_id="p"), sending(chain=chain), sending(**random)]
    assert len({*made}) == len(made)
    assert sending(root_id="the id") == sending(parent_id="the id") == sending()


def test_sender_knows_the_name_of_a_sending() -> None:
    for header in OURS, {**OURS, "sent": "b" * 32}, {**OURS, "replaced": "c" * 32}:
        request = Context({"id": "the id", "root_id": "r", "parent_id": "p", HEADER: header})
        assert Message.of(request).sending == sending_in(header)


@contextmanager
def passed() -> Iterator[set[tuple[str, str]]]:
    """The functions of `task/` that this thread calls: their modules and names."""
    folder, found = str(Path(celery_singleton_lock.__file__).parent / "task"), set[tuple[str, str]]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folder) and "<" not in frame.f_code.co_name:
            found.add((Path(frame.f_code.co_filename).stem, frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)


def test_plain_message_goes_the_short_way(app: Celery) -> None:
    """Nothing is asked that only a message needs that waits, follows, joins, has a lock, or does not run."""
    task = bound(app)
    trace = build_tracer(task.name, task, app=app)
    trace(task.name, (), {}, request_of(task, carries={"sent": "b" * 32}))  # The first message makes what others find.
    with passed() as those:
        trace(task.name, (), {}, request_of(task, carries={"sent": "a" * 32}))
    assert not {module for module, _ in those} & SPECIAL
    assert len({module for module, _ in those}) <= 8
    assert len(those) <= 54
