"""What becomes of a message that meets another task, or a copy of itself: one row for each case."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery import states
from celery.app.task import Context

from celery_singleton_lock.errors import LockConflict, LockSuperseded
from celery_singleton_lock.task import decide
from celery_singleton_lock.task.decide import AFTER_LEASE, SETTLING, Drop, Fail, Finish, Repeat, Run, Wait
from celery_singleton_lock.task.ends import REPLACED, Outcome
from celery_singleton_lock.task.message import HEADER, Message

FIRST, SECOND, REPLACEMENT = (0, 0), (0, 1), (1, 0)

SUCCESS, FAILURE = Outcome(states.SUCCESS), Outcome(states.FAILURE, b"[]")
REVOKED, RETRIED = Outcome(states.REVOKED), Outcome(states.RETRY)
IGNORED, IS_REPLACED = Outcome(states.IGNORED), Outcome(states.IGNORED, REPLACED)

DONE, RUNS = Drop("already done", goes_on=False), Drop("already running", goes_on=True)


def message(*, retries: int = 0, redelivered: bool = False, conflicts: int = 0) -> Message:
    header = {"id": "the id", "put_back": {"retries": retries, "conflict": conflicts}}
    delivery_info = {"redelivered": redelivered}
    return Message.of(Context({"id": "the id", "retries": retries, "delivery_info": delivery_info, HEADER: header}))


@pytest.mark.parametrize("acks_late", [True, False])
@pytest.mark.parametrize(
    ("met", "policy", "becomes"),
    [
        # A message that has not begun: as the option says.
        (message(), "skip", "skip"),
        (message(), "raise", "raise"),
        (message(), "reject", "reject"),
        (message(), "retry", "retry"),
        (message(), "join", "join"),
        (message(), "rerun", "rerun"),
        (message(), "replace", "replace"),
        # One that has begun waits; to join is no refusal, nor to be superseded.
        (message(retries=1), "skip", "retry"),
        (message(retries=1), "raise", "retry"),
        (message(retries=1), "reject", "retry"),
        (message(retries=1), "join", "retry"),
        (message(retries=1), "rerun", "rerun"),
        (message(retries=1), "replace", "replace"),
        (message(redelivered=True), "join", "join"),
        (message(redelivered=True), "rerun", "rerun"),
        # `lock_conflict_retries` bounds those that have not begun.
        (message(conflicts=1), "retry", "retry"),
        (message(conflicts=2), "retry", "raise"),
        (message(conflicts=2), "join", "join"),
        (message(conflicts=2), "rerun", "rerun"),
        (message(conflicts=2, retries=1), "retry", "retry"),
    ],
)
def test_conflict(met: Message, policy: str, becomes: str, acks_late: bool) -> None:
    assert _policy(met, policy, acks_late=acks_late) == becomes


@pytest.mark.parametrize(("acks_late", "becomes"), [(True, "retry"), (False, "skip")])
def test_message_that_comes_again_may_have_begun_if_it_is_acknowledged_late(acks_late: bool, becomes: str) -> None:
    assert _policy(message(redelivered=True), "skip", acks_late=acks_late) == becomes


@pytest.mark.parametrize("policy", ["retry", "join", "rerun", "replace"])
def test_call_by_apply_cannot_wait(policy: str) -> None:
    assert _policy(message(), policy, is_eager=True) == "raise"


def _policy(
    met: Message, policy: Any, *, acks_late: bool = False, is_eager: bool = False, has_replaced: bool = False
) -> str:
    options: Any = SimpleNamespace(on_conflict=policy, conflict_retries=2)
    waits = decide.must_not_be_refused(met, acks_late=acks_late, has_replaced=has_replaced)
    chosen = policy if decide.may_be_refused(met, options, waits=waits) else "retry"
    return decide.policy_for(met, options, chosen, waits=waits, is_eager=is_eager)


@pytest.mark.parametrize("conflicts", [0, 9])
@pytest.mark.parametrize(("policy", "becomes"), [("skip", "retry"), ("raise", "retry"), ("join", "join")])
def test_message_that_has_replaced_another_waits(policy: str, becomes: str, conflicts: int) -> None:
    assert _policy(message(conflicts=conflicts), policy, has_replaced=True) == becomes


CONFLICT = LockConflict("the key", "the other id")


@pytest.mark.parametrize(
    ("policy", "state", "kind", "is_remembered"),
    [
        ("skip", states.REVOKED, "revoked", True),
        ("raise", states.FAILURE, None, True),
        # A dead-letter exchange may send it again on purpose.
        ("reject", states.FAILURE, "rejected", False),
    ],
)
@pytest.mark.parametrize("is_shared", [True, False])
def test_message_that_is_refused_ends(
    policy: Any, state: str, kind: str | None, is_remembered: bool, is_shared: bool
) -> None:
    decided = decide.refused(policy, CONFLICT, is_in_line=True, is_shared=is_shared)
    assert isinstance(decided, Finish)
    assert str(CONFLICT) in str(decided.error)
    assert decided[1:] == (state, kind, is_shared, is_remembered)


@pytest.mark.parametrize("policy", ["retry", "join", "rerun", "replace"])
@pytest.mark.parametrize("is_in_line", [True, False])
def test_message_that_is_refused_waits(policy: Any, is_in_line: bool) -> None:
    decided = decide.refused(policy, CONFLICT, is_in_line=is_in_line, is_shared=False)
    assert decided == Wait("conflict", is_in_line=is_in_line)


RETURNED = RuntimeError("too many workers are gone")


@pytest.mark.parametrize(
    ("met", "returned", "becomes"),
    [
        (message(), None, Run()),
        (message(redelivered=True), None, Run()),
        (message(), RETURNED, Finish(RETURNED, states.FAILURE, "rejected", is_remembered=False)),
        # Celery itself ends what has expired, unless it may have begun.
        (message()._replace(expires="2000-01-01T00:00:00Z"), None, Run()),
    ],
)
def test_message_has_its_lock(met: Message, returned: Exception | None, becomes: object) -> None:
    assert decide.with_lease(met, returned) == becomes


@pytest.mark.parametrize("returned", [None, RETURNED])
def test_message_that_comes_again_too_late_is_revoked(returned: Exception | None) -> None:
    late = message(redelivered=True)._replace(expires="2000-01-01T00:00:00Z")
    decided = decide.with_lease(late, returned)
    assert decided[1:] == (states.REVOKED, "expired", False, True)


@pytest.mark.parametrize(
    ("newest", "has_lock", "is_shared"),
    [("the newest id", False, False), ("the newest id", True, True), ("the id", False, True), (None, False, False)],
)
def test_newer_message_has_come(newest: str | None, has_lock: bool, is_shared: bool) -> None:
    """Its result is its own, unless the newest message, or the task that has the lock, has its id, too."""
    error = LockSuperseded("the key", newest)
    becomes = Finish(error, states.REVOKED, "revoked", is_shared)
    assert decide.superseded(error, "the id", is_shared=has_lock) == becomes
    if not has_lock:
        assert decide.revoked_before(error, "the id") == becomes


def test_message_that_was_skipped_ends_so_again() -> None:
    assert decide.revoked_before(None, "the id")[1:] == (states.REVOKED, "revoked", False, True)


@pytest.mark.parametrize(
    ("policy", "facts", "becomes"),
    [
        ("retry", "", Wait("unavailable")),
        ("retry", "eager", Fail()),
        ("raise", "", Fail()),
        ("raise", "eager", Fail()),
        ("run", "", Run()),
        ("run", "eager", Run()),
        # It has answered, but with the locks of somebody else.
        ("run", "wrong_server", Wait("unavailable")),
        ("run", "eager wrong_server", Fail()),
        # An item of a map.
        ("wait", "eager", None),
    ],
)
def test_lock_server_does_not_answer(policy: str, facts: str, becomes: object) -> None:
    known = {f"is_{fact}": fact in facts.split() for fact in ("eager", "wrong_server")}
    assert decide.in_silence(policy, **known) == becomes


@pytest.mark.parametrize(
    ("own", "running", "acks_late", "becomes"),
    [
        (FIRST, FIRST, True, Wait("copy", 30.0 + AFTER_LEASE)),
        (FIRST, FIRST, False, RUNS),
        (FIRST, SECOND, True, RUNS),
        (FIRST, REPLACEMENT, True, RUNS),
        (SECOND, FIRST, True, Wait("copy", 30.0 + AFTER_LEASE)),
        (SECOND, FIRST, False, Wait("copy", 30.0 + AFTER_LEASE)),
        (SECOND, REPLACEMENT, False, RUNS),
    ],
)
def test_copy_runs(own: tuple[int, int], running: tuple[int, int], acks_late: bool, becomes: Drop | Wait) -> None:
    assert decide.beside_copy(own, running, acks_late=acks_late, lease=30.0) == becomes


@pytest.mark.parametrize(
    ("recorded", "age", "facts", "becomes"),
    [
        # Nobody waits for it, or all is reported.
        (SUCCESS, 0.0, "", DONE),
        (FAILURE, 60.0, "", DONE),
        (SUCCESS._replace(settled=True), 0.0, "awaited", DONE),
        (REVOKED._replace(settled=True), 60.0, "awaited", DONE),
        (SUCCESS, 0.0, "awaited stored", DONE),
        (FAILURE, 60.0, "awaited stored", DONE),
        # It, or what has its id, goes on.
        (RETRIED, 0.0, "awaited", Drop("retried", goes_on=True)),
        (RETRIED, 0.0, "", Drop("retried", goes_on=True)),
        (RETRIED._replace(settled=True), 0.0, "awaited", Drop("retried", goes_on=False)),
        (IS_REPLACED, 0.0, "awaited", Drop("replaced", goes_on=True)),
        (IS_REPLACED._replace(settled=True), 60.0, "awaited", Drop("replaced", goes_on=False)),
        (IGNORED, 0.0, "awaited", DONE),
        # Its own process may be reporting it.
        (SUCCESS, 4.0, "awaited", Wait("copy", SETTLING - 4.0)),
        (REVOKED, 0.0, "awaited", Wait("copy", SETTLING)),
        (SUCCESS, 4.0, "awaited stored part", Wait("copy", SETTLING - 4.0)),
        # Nobody has reported it.
        (SUCCESS, SETTLING, "awaited", Repeat()),
        (FAILURE, 60.0, "awaited", Repeat()),
        (REVOKED, 60.0, "awaited", Repeat()),
        (SUCCESS, 60.0, "awaited part", Repeat()),
        (SUCCESS, 60.0, "awaited stored part", Repeat()),
    ],
)
def test_message_has_ended(recorded: Outcome, age: float, facts: str, becomes: object) -> None:
    known = {f"is_{fact}": fact in facts.split() for fact in ("awaited", "stored", "part")}
    assert decide.after_end(recorded, age, **known) == becomes
