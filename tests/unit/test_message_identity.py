"""The name of a sending: the same for everything that follows from one send, and a new one for each new send."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, chain
from celery.app.task import Context
from celery.exceptions import Ignore
from celery.signals import before_task_publish

from celery_singleton_lock.task import message_identity, requeue
from celery_singleton_lock.task.header import HEADER
from celery_singleton_lock.task.running import progress_of
from tests.unit.deliveries import bound

_numbers = itertools.count()


@pytest.fixture
def sent() -> Iterator[list[Any]]:
    """The requests that a worker would make of the messages that are sent."""
    requests: list[Any] = []

    def note(headers: dict[str, Any], body: Any, **_: Any) -> None:
        requests.append(Context({**headers, **body[2]} if "id" in headers else {**body, **headers}))

    before_task_publish.connect(note)
    yield requests
    before_task_publish.disconnect(note)


def deliver(task: Any, request: Any, **changes: Any) -> Any:
    """Carry out the message as a worker does."""
    task.push_request(**{**vars(request), "called_directly": False, "is_eager": False, "delivery_info": {}, **changes})
    try:
        return task()
    finally:
        task.pop_request()


def in_worker(task: Any, request: Any, follow: Any) -> None:
    """Call `follow` as a worker does to send callbacks and next steps of a task that has ended."""
    from celery._state import _task_stack

    _task_stack.push(task)
    task.push_request(**{**vars(request), "called_directly": False, "is_eager": False, "delivery_info": {}})
    progress_of(task.request).in_body = False
    try:
        follow()
    finally:
        task.pop_request()
        _task_stack.pop()


def test_one_id_sent_twice_is_two_sendings(app: Celery, sent: list[Any]) -> None:
    signature = bound(app).s()
    signature.freeze()
    signature.apply_async()
    signature.apply_async()
    first, second = sent
    assert first.id == second.id
    assert message_identity.sending_of(first) != message_identity.sending_of(second)


def test_last_step_of_a_chain_that_is_sent_twice_is_two_sendings(app: Celery, sent: list[Any]) -> None:
    first, last = bound(app), bound(app)
    nightly = chain(first.si(), last.si())
    for _ in range(2):
        nightly.apply_async()
    one, other = sent
    for request in (one, other):
        step = app.signature(request.chain[-1])
        in_worker(first, request, lambda step=step, id=request.id: step.apply_async(parent_id=id, root_id=id))
    assert message_identity.sending_of(sent[2]) != message_identity.sending_of(sent[3])


def test_two_copies_of_one_message_send_one_next_step(app: Celery, sent: list[Any]) -> None:
    first, last = bound(app), bound(app)
    first.delay()
    (request,) = sent
    for _ in range(2):
        in_worker(first, request, lambda: last.apply_async(task_id="next", parent_id=request.id, root_id=request.id))
    assert message_identity.sending_of(sent[1]) == message_identity.sending_of(sent[2])


def test_message_that_a_body_sends_is_new_each_time(app: Celery, sent: list[Any]) -> None:
    other = bound(app)
    task = bound(app, lambda self: other.apply_async(task_id="fixed"))
    task.delay()
    from celery._state import _task_stack

    _task_stack.push(task)
    try:
        deliver(task, sent[0])
        deliver(task, sent[0], id="another")
    finally:
        _task_stack.pop()
    assert sent[1].id == sent[2].id
    assert message_identity.sending_of(sent[1]) != message_identity.sending_of(sent[2])


@pytest.mark.parametrize("protocol", [1, 2])
@pytest.mark.parametrize("has_parent", [False, True])
def test_retry_and_replacement_belong_to_the_same_sending(
    app: Celery, sent: list[Any], protocol: int, has_parent: bool
) -> None:
    app.conf.task_protocol = protocol
    task = bound(app)
    task.apply_async(**({"parent_id": "parent", "root_id": "root"} if has_parent else {}))
    (request,) = sent

    def retry() -> None:
        task.signature_from_request(task.request, retries=1).apply_async()

    def replace() -> None:
        signature = task.s()
        signature.freeze(task.request.id)
        signature.set(root_id=task.request.root_id, replaced_task_nesting=1)
        progress_of(task.request).in_body = True
        signature.apply_async()

    in_worker(task, request, retry)
    in_worker(task, request, replace)
    in_worker(task, sent[2], retry)
    assert len({message_identity.sending_of(it) for it in sent}) == 1
    assert [message_identity.replaced(it) for it in sent] == [0, 0, 1, 1]


@pytest.mark.parametrize("nonsense", [7, "", "x" * 32, "0" * 33, ["0" * 32], {"a": 1}, "0" * 32 + "/1", None, "\ud800"])
def test_forged_header_is_ignored(nonsense: object) -> None:
    bare = Context({"id": "1", "root_id": "1", "parent_id": None})
    forged = Context({"id": "1", "root_id": "1", "parent_id": None, HEADER: {"id": "1", "sent": nonsense}})
    assert message_identity.sending_of(forged) == message_identity.sending_of(bare)
    assert message_identity.replaced(forged) == 0


def test_root_and_parent_distinguish_sendings_without_the_header() -> None:
    names = {
        message_identity.sending_of(Context({"id": "1", "root_id": root, "parent_id": parent}))
        for root in ("a", "b")
        for parent in ("c", "d")
    }
    assert len(names) == 4


@pytest.mark.parametrize("task_id", [None, 7, "x" * 1000, "\x1b[2J", "\ud800", ["a"]])
def test_name_of_a_record_is_short_and_plain_whatever_the_id(task_id: object) -> None:
    name = message_identity.record_name("task", task_id, message_identity.sending_of(Context({"id": task_id})))
    assert len(name) < 100
    assert name.isascii()
    assert name.isprintable()


def test_records_of_two_tasks_have_two_names() -> None:
    assert message_identity.record_name("a", "id", "0" * 32) != message_identity.record_name("b", "id", "0" * 32)


@pytest.mark.parametrize("root", [None, "1"])
def test_retry_belongs_to_its_message_even_if_that_had_no_root(root: str | None) -> None:
    """Old clients and other programs send such messages; Celery gives the retry its own id as the root and parent."""
    first = Context({"id": "1", "root_id": root, "parent_id": None})
    retry = Context({"id": "1", "root_id": "1", "parent_id": "1", "retries": 1})
    assert message_identity.sending_of(first) == message_identity.sending_of(retry)


def test_task_that_its_own_handler_sends_again_is_a_new_sending(app: Celery, sent: list[Any]) -> None:
    task = bound(app)
    task.delay()
    (request,) = sent
    for _ in range(2):
        in_worker(task, request, lambda: task.apply_async(task_id=request.id))
    first, again, copy = (message_identity.sending_of(it) for it in sent)
    assert again != first
    assert again == copy, "two copies of one message send one"


@pytest.mark.parametrize("has_header", [True, False])
@pytest.mark.parametrize("retries", [0, 1])
def test_rebuilt_copy_belongs_to_the_same_sending(app: Celery, sent: list[Any], has_header: bool, retries: int) -> None:
    """With a user's own Request class the message itself is not available; some messages have no header."""
    task, following = bound(app), bound(app)
    task.delay()
    request = sent[0]
    if not has_header:
        request = Context({"id": request.id, "root_id": request.id, "parent_id": None, "args": (), "kwargs": {}})
    request.retries = retries

    def put_back() -> None:
        with pytest.raises(Ignore):
            requeue.put_back(task, reason="copy", delay=0.0)

    def follow(its: Any) -> None:
        in_worker(task, its, lambda: following.apply_async(task_id="next", parent_id=its.id, root_id=its.id))

    in_worker(task, request, put_back)
    copy = sent[1]
    assert (copy.id, copy.retries) == (request.id, retries)
    assert message_identity.sending_of(copy) == message_identity.sending_of(request)
    in_worker(task, copy, put_back)
    assert message_identity.sending_of(sent[2]) == message_identity.sending_of(request), "a copy of the copy as well"
    follow(request)
    follow(copy)
    assert message_identity.sending_of(sent[3]) == message_identity.sending_of(sent[4]), "both send one next step"


@pytest.mark.parametrize(
    ("options", "sender", "by_body"),
    [
        ({"task_id": "x"}, "plain", True),
        ({"task_id": "x", "root_id": "another", "parent_id": "another"}, "plain", True),
        ({"task_id": "x", "root_id": "root", "parent_id": "the id"}, "plain", False),
        ({"task_id": "x", "root_id": "root"}, "plain", False),
        ({"task_id": "body"}, "plain", False),
        ({"task_id": "in the body"}, "plain", False),
        ({"task_id": "x"}, "celery.chord_unlock", False),
    ],
    ids=[
        "sent",
        "its canvas",
        "callback",
        "chain as a callback",
        "chord's body",
        "part of that",
        "chord without redis",
    ],
)
def test_what_celery_sends_on_for_a_plain_task_is_known_by_what_it_passes(
    app: Celery, options: dict[str, Any], sender: str, by_body: bool
) -> None:
    part = {"task": "job", "options": {"task_id": "in the body"}}
    chord = {"task": "job", "options": {"task_id": "body"}, "kwargs": {"tasks": [part]}}
    task = app.task(name=sender, shared=False)(bound(app).run)
    task.push_request(id="the id", root_id="root", chord=chord, called_directly=False)
    try:
        assert message_identity.is_sent_by_body(options, task) is by_body
    finally:
        task.pop_request()


@pytest.mark.parametrize("way", ["body", "link"])
def test_plain_task_that_is_called_eagerly_sends_as_in_a_worker(app: Celery, sent: list[Any], way: str) -> None:
    """The second time it is a copy of the first, if Celery sends it on."""
    app.conf.update(broker_url="memory://")
    task = bound(app)
    signature = task.s().set(task_id="fixed")

    def body() -> None:
        if way == "body":
            signature.apply_async()

    plain = app.task(name="plain", shared=False)(body)
    for _ in range(2):
        plain.apply(task_id="the id", link=[task.si().set(task_id="fixed")] if way == "link" else None)
    names = [message_identity.sending_of(it) for it in sent]
    assert len(names) == 2
    assert (names[0] == names[1]) is (way == "link")
