"""What belongs together: a message, its copies, its next attempts and what follows from it are one sending."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from celery import chain, chord
from celery.backends.cache import CacheBackend
from celery.result import GroupResult

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.testing import hold_lock
from tests.bench import Bench, Sent

VALUES = (True, "x", ["x"], {"key": "k", "owner": "o" * 32, "held": True})


def come_again(bench: Bench, message: Sent) -> None:
    """A copy comes late; the worker of the message died before it stored a result."""
    bench.forget(message)
    bench.later(11.0)
    bench.deliver(message, redelivered=True)


def test_one_id_sent_twice_runs_twice(bench: Bench) -> None:
    signature = bench.task().s()
    signature.freeze()
    for _ in range(2):
        signature.apply_async()
        (message,) = bench.queued()
        bench.deliver(message)
        come_again(bench, message)
    assert bench.runs == [message.id] * 2


@pytest.mark.parametrize("canvas", [{}, {"root_id": "another", "parent_id": "another"}], ids=["alone", "canvas"])
@pytest.mark.parametrize("is_exclusive", [True, False])
def test_message_that_a_body_sends_is_new_each_time(bench: Bench, is_exclusive: bool, canvas: dict[str, str]) -> None:
    other = bench.task()

    def send() -> None:
        other.apply_async(task_id="fixed", **canvas)

    sender = bench.app.task(name="sender", shared=False, **({"base": SingletonTask} if is_exclusive else {}))(send)
    for _ in range(2):
        bench.deliver(bench.send(sender))
        (message,) = bench.queued()
        bench.deliver(message)
        bench.forget(message)
    assert bench.runs == ["fixed"] * 2


@pytest.mark.parametrize("way", ["link", "chain", "chord", "chord that a task watches"])
def test_plain_task_that_comes_again_is_followed_by_one_message(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    last = bench.task().si().set(task_id="last")

    @bench.app.task(name="plain", shared=False)
    def plain() -> None: ...

    if way == "link":
        plain.apply_async(link=last)
    elif way == "chain":
        chain(plain.si(), last).apply_async()
    else:
        monkeypatch.setattr(CacheBackend, "implements_incr", way == "chord")
        monkeypatch.setattr(CacheBackend, "incr", lambda *_: 1)
        monkeypatch.setattr(GroupResult, "delete", lambda *_: None)  # Its worker dies before that.
        chord([plain.si()], last).apply_async()
    *parts, message = sorted(bench.queued(), key=lambda it: str(it.headers["task"]), reverse=True)
    for part in parts:
        bench.deliver(part)
    for _ in range(2):
        bench.deliver(message)
        come_again(bench, bench.put_back())
    assert bench.runs == [bench.runs[0]]


@pytest.mark.parametrize("way", ["body", "link"])
def test_plain_task_that_is_called_eagerly_sends_as_in_a_worker(bench: Bench, way: str) -> None:
    """The second time it is a copy of the first, if Celery sends it on."""
    task = bench.task()
    last = task.si().set(task_id="fixed")

    @bench.app.task(name="plain", shared=False)
    def plain() -> None:
        if way == "body":
            last.apply_async()

    for _ in range(2):
        plain.apply(task_id="the id", link=[last] if way == "link" else None)
        come_again(bench, bench.put_back())
    assert len(bench.runs) == (1 if way == "link" else 2)


def test_task_that_its_own_handler_sends_again_is_a_new_sending(bench: Bench) -> None:
    def send_again(task: Any, *_: Any) -> None:
        if len(bench.runs) == 1:
            task.apply_async(task_id=task.request.id)

    message = bench.send(bench.task(on_success=send_again))
    bench.deliver(message)
    again = bench.put_back()
    come_again(bench, message)
    for copy in (again, *bench.queued()):
        come_again(bench, copy)
    assert bench.runs == [message.id] * 2, "two copies of one message send one"


@pytest.mark.parametrize("has_header", [True, False])
def test_copy_that_is_made_anew_belongs_to_its_message(bench: Bench, has_header: bool) -> None:
    """With a user's own Request class, the message itself is not available."""
    last = bench.task()
    task = bench.task(Request="celery.worker.request:Request", on_conflict="retry")
    message = bench.send(task, link=last.si().set(task_id="last"))
    copy = message if has_header else without_header(message)
    copies = [copy]
    for _ in range(2):
        with hold_lock(task):
            bench.deliver(copies[-1])
        copies.append(bench.put_back())
    assert bench.deliver(copies[-1]) == "ran"
    for copy in copies:
        come_again(bench, copy)
    for following in bench.queued():
        come_again(bench, following)
    assert bench.runs == [message.id, "last"]


def test_two_tasks_of_one_lock_may_have_one_id(bench: Bench) -> None:
    for _ in range(2):
        message = without_header(bench.send(bench.task(lock_name="same"), task_id="fixed"))
        bench.deliver(message)
        bench.forget(message)
    assert bench.runs == ["fixed"] * 2


@pytest.mark.parametrize("task_id", ["x" * 1000, "\x1b[2J"], ids=["long", "control"])
def test_message_is_remembered_whatever_its_id(bench: Bench, task_id: str) -> None:
    message = bench.send(bench.task(), task_id=task_id)
    come_again(bench, message)
    come_again(bench, message)
    assert bench.runs == [task_id]


def without_header(message: Sent) -> Sent:
    """The same from a program without this package."""
    headers = {name: value for name, value in message.headers.items() if name != "singleton_lock"}
    return Sent(message.id, message.body, headers, message.properties, message.content, message.route)


@pytest.mark.parametrize("has_header", [True, False])
@pytest.mark.parametrize("has_parent", [True, False])
def test_retry_and_replacement_belong_to_their_message(bench: Bench, has_header: bool, has_parent: bool) -> None:
    """Copies of any of them run nothing again; programs without our code send no header."""

    def body() -> str:
        if len(bench.runs) == 1:
            task.retry(countdown=0)
        if len(bench.runs) == 2:
            raise task.replace(task.si())
        return "ran"

    task = bench.task(body, acks_late=True)
    message = bench.send(task, **({"parent_id": "parent", "root_id": "root"} if has_parent else {}))
    if not has_header:
        message = without_header(message if has_parent else message.but(root_id=None))
    all_of_it = [message]
    for _ in range(2):
        bench.deliver(all_of_it[-1])
        all_of_it.append(bench.put_back())
    assert bench.deliver(all_of_it[-1]) == "ran"
    assert {each.id for each in all_of_it} == {message.id}
    for each in all_of_it:
        come_again(bench, each)
    assert bench.runs == [message.id] * 3
    assert bench.queued() == []


@pytest.mark.parametrize("other", [{"root_id": "another"}, {"parent_id": "another"}])
def test_root_and_parent_tell_messages_without_a_header_apart(bench: Bench, other: dict[str, str]) -> None:
    message = bench.send(bench.task())
    for changes in ({}, other):
        bench.deliver(message.but(singleton_lock=None, **changes))
        bench.forget(message)
    assert len(bench.runs) == 2


@pytest.mark.parametrize("inner", [{}, {"user": 7}])
def test_next_attempt_locks_as_its_call_said(bench: Bench, inner: dict[str, Any]) -> None:
    """Also if somebody nests headers in the message's headers."""

    def body() -> str:
        keys.append(task.lock.key)
        return task.retry(countdown=0) if len(bench.runs) == 1 else "ran"

    keys: list[str] = []
    bench.app.conf.singleton_lock_accept = ["key"]
    task = bench.task(body)
    message = bench.send(task, singleton_lock={"key": "another"})
    bench.deliver(message.but(headers=inner))
    assert bench.deliver(bench.put_back()) == "ran"
    assert keys[0] == keys[1] != task.lock_key_of()


@pytest.mark.parametrize("inner", [None, {}, {"user": 7}])
def test_message_whose_header_was_moved_or_lost_is_told_of_once(
    bench: Bench, caplog: pytest.LogCaptureFixture, inner: Any
) -> None:
    """What it waits for, or took when it was sent, is not known: somebody rewrites headers."""
    message = bench.send(bench.task())
    stripped = without_header(message).but(retries=1)
    if inner is not None:
        stripped = stripped.but(headers={**inner, "singleton_lock": message.headers["singleton_lock"]})
    assert bench.deliver(stripped) == "ran"
    assert caplog.text.count("came without the header") <= 1


@pytest.mark.parametrize("value", VALUES)
def test_no_header_forges_what_a_process_knows_of_its_message(bench: Bench, value: object) -> None:
    def body() -> str:
        names.update(name for name in vars(task.request) if "singleton" in name)
        names.update(name for name in task.request.properties or () if "singleton" in name)
        assert task.lock.held
        return "ran"

    names: set[str] = set()
    task = bench.task(body)
    assert bench.deliver(bench.send(task)) == "ran"
    forged = dict.fromkeys({*names, "lease", "in_body", "owner"} - {"singleton_lock"}, value)
    message = bench.send(task, link=bench.task().si().set(task_id="last")).but(**forged)
    assert bench.deliver(message) == "ran"
    come_again(bench, message)
    for following in bench.queued():
        come_again(bench, following)
    assert bench.runs[1:] == [message.id, "last"]


def test_finished_request_is_not_kept(bench: Bench) -> None:
    """Not even for what is still to be confirmed."""
    seen: list[weakref.ref[Any]] = []
    task = bench.task(lambda: seen.append(weakref.ref(task.request)))
    bench.deliver(bench.send(task, link=task.si()))
    gc.collect()
    assert [ref() for ref in seen] == [None]
