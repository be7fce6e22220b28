"""Messages that have a lock while they wait, and what must hold: no other is sent meanwhile, and the lock ends with it.

The checker follows each lock on the server by its owner, which the message names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from celery import states

from tests.simulation import apps, holds, inside, trouble
from tests.simulation.inside import UNCONFIRMED_TTL
from tests.simulation.plan import Message
from tests.simulation.scheduler import Process, every
from tests.simulation.world import Running

#: Seconds of the simulation between two looks.
OFTEN = 0.05

#: Seconds within which the lock of an ended message is free, and the lock of a sent message is confirmed.
AT_ONCE, CONFIRMED = 1.5, 2.5

#: Seconds from the release of a lock until the checker learns why.
SOON_SAID = 0.5

#: Seconds by which an expiry may be off: clocks differ, and the program has asked before we look.
NEARLY = 0.6

#: Seconds of a body after which the lock of a message acknowledged early ends with its process.
BEGUN = inside.SOON + 0.6

#: The hold of a lock that nobody has.
NOBODY = "", 0.0, b""

#: Number of network messages to a lock server and back that this takes, if these are slow.
SOME = 10

#: Faults that delay no send, confirmation or release.
HARMLESS = (
    *(*trouble.BRIEF, "sending refused", "sending unheard", "sending slow", "queue purged", "message lost", "revoked"),
    *("sender dies", "sender dies before it sends", "sender dies as it has sent"),
    *("child killed at a start", "worker killed at a start"),
)


@dataclass(eq=False)
class Claim:
    """A message that has a lock.

    Attributes:
        key: of the hold on the server.
        sender: the process that sent it first.
        sent_at: when the broker last got it.
        is_sure: whether its sender knows that it was sent, or is gone.
        over_at: since when it does not need its lock.
        is_ending: whether it may have freed its lock by now.
        ends_at: when its hold expires, as last seen; 0 if there was none.
        begun_at, begun_in: when its body began, and in which process.
        is_void: whether it has lost its lock for a known reason.
        taken_at: since when it may have its lock.
        gone_at: when the lock was seen to be gone.
        least: least seconds that the lock lasts once it is confirmed.
        looked: how often a follower has looked in vain, according to its last copy.
    """

    task_id: str
    task: str
    key: str
    owner: str
    seconds: float
    scope: str
    lock: inside.QueueLock
    sender: Process
    sent_at: float
    is_sure: bool = False
    over_at: float | None = None
    is_ending: bool = False
    ends_at: float = 0.0
    begun_at: float | None = None
    begun_in: Process | None = None
    died_at: float | None = None
    is_void: bool = False
    taken_at: float = 0.0
    gone_at: float | None = None
    least: float = 0.0
    looked: int = 0

    @property
    def is_late(self) -> bool:
        return bool(apps.TASKS[self.task].get("acks_late"))


@dataclass(eq=False)
class Call:
    """A call that sends a message."""

    message: Message
    process: Process
    began: float
    #: Messages that had ended so long before that nobody meets them.
    over: frozenset[str]
    is_sent: bool = False
    returned_at: float | None = None
    failed_at: float | None = None

    @property
    def task_id(self) -> str:
        return f"m{self.message.number}"


@dataclass(eq=False)
class Queued:
    """The checker of these messages."""

    world: Any
    entrance: Any = None
    #: By the owner.
    claims: dict[str, Claim] = field(default_factory=dict)
    #: The same for followers that do not have their locks, or gave them back.
    followers: dict[str, Claim] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)
    #: Ids of messages that the broker has lost.
    lost: set[str] = field(default_factory=set)
    #: Which processes in which the next bodies begin are to be killed, and after how many seconds.
    doomed: list[tuple[str, float]] = field(default_factory=list)
    #: Expected confirmations: when to check, since when, for how long, by which process, and of which lock.
    _confirmed: list[tuple[float, float, float, Process, Claim]] = field(default_factory=list)
    #: When holds without a sent message were first seen.
    _unsent: dict[tuple[str, str], float] = field(default_factory=dict)
    _forgot_at: float = -1.0

    def __post_init__(self) -> None:
        self.run = self.world.run
        self.world.senders_queue = self
        self._more = SOME * self.world.plan.latency
        self.world.broker.on_put.append(self._put)
        self.world.at_received.append(self._received)
        self.world.bodies.watched.append((self._body_begins, self._body_ends))

    # What the senders say

    def begins(self, message: Message, process: Process) -> Call:
        """A program calls a task."""
        since = self.run.now - AT_ONCE - self._more
        open_ = {it.task_id for it in self.claims.values() if it.over_at is None or it.over_at > since}
        over = {it.task_id for it in self.claims.values()} - open_
        call = Call(message, process, self.run.now, frozenset(over))
        self.calls[call.task_id] = call
        self.world.asked_at[message.number] = self.run.now
        return call

    def is_foreign(self, message: Message) -> None:
        """The task is sent by name, with the header of another message."""
        self.calls[f"m{message.number}"] = call = Call(message, self.run.current.process, self.run.now, frozenset())
        call.is_sent = True

    def lock_of(self, task_id: str) -> inside.QueueLock | None:
        """The lock of a message that was sent, as its header names it."""
        return claim.lock if (claim := self.claim_of(task_id)) is not None else None

    def returns(self, call: Call) -> None:
        """The message was sent, as far as its sender knows."""
        must, number = self.run.must, call.message.number
        must(call.is_sent, "message {} is sent, as its caller is told, and the broker has nothing", number)
        call.returned_at = self.run.now
        claim = self.claim_of(call.task_id)
        if claim is not None:
            claim.is_sure = True
            if claim.scope != "until_expired":
                self._to_confirm(call.process, claim)
        if not (call.message.chained or self._is_excused(call.began)):
            must(claim is not None, "message {} is sent without a lock", number)

    def fails(self, call: Call, error: Exception) -> None:
        """Nothing was sent, as far as the caller knows."""
        self.run.note("is not sent", f"{call.task_id}: {error!r}")
        call.failed_at = self.run.now
        if call.message.task != "shop.strict":
            is_other = type(error).__name__ != "LockUnavailable"
            self.run.must(is_other, "message {} is not sent, and its task says to send it", call.message.number)
        if (claim := self.claim_of(call.task_id)) is not None:
            claim.over_at = claim.over_at or self.run.now

    def is_skipped(self, call: Call, result: Any) -> None:
        """The call is a duplicate with its own result."""
        self.run.note("is a duplicate", call.task_id)
        must, number = self.run.must, call.message.number
        must(result.state == states.REVOKED, "message {} is skipped, and its result is {}", number, result.state)
        self._is_not_sent(call)
        is_there = any(it.task == call.message.task for it in self._others(call))
        must(is_there, "message {} is skipped, and no other one waits or runs", number)

    def is_duplicate(self, call: Call, task_id: str, since: float) -> None:
        """The call is a duplicate of the message with this id."""
        self.run.note("is a duplicate", f"{call.task_id} of {task_id}")
        self._is_not_sent(call)
        must, number, other = self.run.must, call.message.number, self.calls.get(task_id)
        is_sent = other is not None and other is not call
        must(is_sent, "message {} is a duplicate of {}, which nobody has sent", number, task_id)
        if other is None:
            return
        is_same = (other.message.task, other.message.key) == (call.message.task, call.message.key)
        must(is_same, "message {} is a duplicate of {}, which has another key", number, task_id)
        if not self._is_excused(call.began - AT_ONCE):
            must(task_id not in call.over, "message {} is a duplicate of {}, which is over", number, task_id)
        over = other.failed_at
        is_open = over is None or self._may_last(over, call.began) or self._is_excused(over - SOON_SAID)
        must(is_open, "message {} is a duplicate of {}, whose caller was told that it is not sent", number, task_id)

    def _is_not_sent(self, call: Call) -> None:
        number = call.message.number
        self.run.must(not call.is_sent, "message {} is a duplicate, and is sent", number)
        self.run.must(not call.message.chained, "message {} is not sent, and something follows on it", number)

    def _others(self, call: Call) -> list[Message]:
        """The messages of calls with the same key that may have the lock."""
        return [
            it.message
            for task_id, it in self.calls.items()
            if it is not call and it.message.key == call.message.key
            if task_id not in call.over
        ]

    # What the world sees

    def is_lost(self, task_id: str, *, goes_on: bool) -> None:
        """The broker has lost a copy. If a delivery of the same message sent it (`goes_on`), as a retry or to put
        itself back, this delivery may still be there, but does not send it again.
        """
        self.run.note("is lost", task_id, by="broker")
        if goes_on or (task_id not in self.world.broker.ids() and not self._runs(task_id)):
            self.lost.add(task_id)
            for claim in self._claims_of(task_id):
                claim.is_void = True

    def forget(self) -> None:
        """The server has forgotten the locks of all messages."""
        for claim in self.claims.values():
            claim.is_void = True
        self._forgot_at = self.run.now

    def has_ended(self, task_id: str) -> None:
        """The message has an end."""
        for claim in self._claims_of(task_id):
            claim.over_at = claim.over_at or self.run.now

    def _put(self, message: dict[str, Any], is_taken: bool) -> None:
        headers = message.get("headers") or {}
        task_id, call = headers.get("id"), self.calls.get(headers.get("id", ""))
        if not is_taken or call is None:
            return
        process = self.run.current.process
        is_first = process is call.process and not call.is_sent
        call.is_sent = True
        self.world.sent[call.message.number] = (task_id, call.message)
        lock = inside.lock_in(headers)
        if lock is None or lock.task != headers.get("task"):
            return
        if lock.follows is not None:
            self._follows(headers, lock, process)
        claim = self.claims.get(owner := lock.owner)
        if claim is None and owner in self.followers:
            return
        if claim is None:
            claim = self.claims[owner] = self._claim(task_id, lock, process)
            claim.taken_at = call.began if is_first else self.run.now
            self._counts_its_countdown(claim, call.message, is_first)
            if not self._is_replaced(claim):
                self._is_only_one(claim, call.began if is_first else self.run.now)
        self._is_sent_again(claim, lock)
        # A message that a worker sends is certain as soon as the broker has it.
        claim.is_sure = claim.is_sure or not is_first

    def _claim(self, task_id: str, lock: inside.QueueLock, process: Process) -> Claim:
        key, owner = inside.of_lock(lock.key), lock.owner
        return Claim(task_id, lock.task, key, owner, lock.seconds, lock.scope, lock, process, self.run.now)

    def _is_replaced(self, newer: Claim) -> bool:
        """Whether it, or another message with its lock, comes in the place of another: each may lose its lock."""
        claims = [claim for claim in self.claims.values() if claim.key == newer.key]
        is_one = any(claim.lock.replaces for claim in claims)
        for claim in claims:
            claim.is_void |= is_one
        return is_one

    def _is_sent_again(self, claim: Claim, lock: inside.QueueLock) -> None:
        claim.sent_at, claim.seconds = self.run.now, max(lock.seconds, claim.seconds)
        # A retry may need it for less than the attempt before.
        claim.least = min(lock.seconds, claim.least or lock.seconds)

    def _follows(self, headers: dict[str, Any], lock: inside.QueueLock, process: Process) -> None:
        """A follower is sent, or its copy after another look in vain: it does not have its lock."""
        task_id, owner, put_back = headers["id"], lock.owner, inside.header_of(headers).put_back
        looked = put_back.follows if put_back is not None else 0
        claim = self.claims.get(owner) or self.followers.get(owner)
        if claim is None:
            claim = self.followers[owner] = self._claim(task_id, lock, process)
            claim.is_sure = True
        elif looked > claim.looked and self.claims.pop(owner, None):
            self.followers[owner] = claim
        claim.looked = looked
        self._is_sent_again(claim, lock)

    def _leads(self, owner: str) -> Claim | None:
        """A follower has got its lock: its leader is gone."""
        claim = self.followers.pop(owner, None)
        if claim is not None:
            claim.taken_at, claim.over_at = self.run.now, None
            self.claims[owner] = claim
        return claim

    def _counts_its_countdown(self, claim: Claim, message: Message, is_first: bool) -> None:
        """Check that a configured bound counts from when the message is due."""
        longest, words = self.world.plan.queue_ttl, apps.words_of(message.sent)
        if not is_first or longest is None or claim.scope == "until_expired":
            return
        is_right = abs(claim.seconds - longest - float(words.get("countdown", 0))) <= NEARLY
        what = claim.task_id, claim.seconds, message.sent or "at once"
        self.run.must(is_right, "the lock of {} is to last for {:g} s: {}", *what)

    def _is_only_one(self, claim: Claim, began: float) -> None:
        """Check that the message has its lock when the broker gets it, so that no other message waits.

        A lock that is not confirmed yet may have expired by then if sending takes long. Somebody may have cleared it.
        """
        owner = self.has(claim.key)
        is_in_time = self.run.now - began < min(UNCONFIRMED_TTL, claim.seconds) - NEARLY
        if not is_in_time or self._forgot_at >= began:
            return
        if not self._is_excused(self.run.now - NEARLY):
            self.run.must(owner == claim.owner, "message {} is sent, and its lock is not its", claim.task_id)
        for other in self.claims.values():
            if other.key == claim.key and other is not claim:
                is_free = other.owner != owner or not self.waits(other)
                self.run.must(is_free, "message {} is sent, while {} waits", claim.task_id, other.task_id)

    def _received(self, process: Process, headers: Any) -> None:
        lock = inside.lock_in(headers)
        claim = self.claims.get(lock.owner) if lock is not None else None
        if claim is not None and claim.task_id == headers.get("id") and claim.scope != "until_expired":
            self._to_confirm(process, claim)

    def _body_begins(self, body: Running, request: Any) -> None:
        claim = self._brought_by(request)
        if self.doomed:
            of, seconds = self.doomed.pop(0)
            self.run.after(seconds, lambda: self._kill(body.process, of))
        if claim is None:
            return
        claim.begun_at, claim.begun_in, claim.is_ending = self.run.now, body.process, False
        body.process.at_end.append(lambda: self._dies(claim, body.process))
        if claim.scope in ("until_executing", "until_and_while_executing"):
            claim.over_at = claim.over_at or self.run.now

    def _body_ends(self, body: Running, request: Any) -> None:
        claim = self._brought_by(request)
        _, message = self.world.sent[body.number]
        if claim is not None and body.attempt >= int(apps.words_of(message.words).get("retries", "0")):
            claim.is_ending = True

    def _kill(self, process: Process, of: str) -> None:
        worker = next((it for it in self.world.workers if it.process in (process, process.parent)), None)
        if worker is None:
            return  # It has been killed by something else, and another worker is there by now.
        self.run.strikes(f"{of} killed at a start")
        if of == "child" and process.parent is not None:
            self.run.kill(process)
            return
        for child in worker.living:
            self.run.kill(child.process)
        worker.kill()
        self.run.after(1.0, worker.start)

    def _dies(self, claim: Claim, process: Process) -> None:
        if claim.begun_in is process and claim.died_at is None and not claim.is_ending:
            claim.died_at = self.run.now

    # What must hold

    @every(OFTEN)
    def look(self) -> None:
        """Check, when time is about to advance."""
        (server,) = self.world.servers
        if server.model is None:
            return
        found = self._found()
        for key, (owner, ends_at, value) in found.items():
            claim = self.claims.get(owner) or self._leads(owner)
            if claim is None:
                self._is_provisional(key, owner, ends_at, value)
            else:
                self._lasts_as_long(claim, ends_at)
        for claim in self.claims.values():
            owner, ends_at, _ = found.get(claim.key, NOBODY)
            if claim.scope == "until_expired":
                self._lasts_for_its_time(claim, owner)
            else:
                self._look_at(claim, ends_at if owner == claim.owner else None)
        self._are_confirmed(found)
        self._are_given_up(found)

    def _look_at(self, claim: Claim, ends_at: float | None) -> None:
        now, was, must = self.run.now, claim.ends_at, self.run.must
        if self._is_kept(claim):
            is_there = ends_at is not None or not was or now < was - NEARLY
            must(is_there, "the lock of {} has ended, and its body runs", claim.task_id)
        if ends_at is not None:
            claim.ends_at = ends_at
            if not was and self._leads_again(claim):
                claim.taken_at, claim.over_at = now, None
            over = claim.over_at
            if over is not None and not self._is_excused(over - SOON_SAID):
                may_last, seconds = self._may_last(over, now), now - over
                must(may_last, "for {:.1f} s: the lock of {} is held, which is over", seconds, claim.task_id)
            self._ends_with_its_process(claim, ends_at)
            return
        claim.ends_at = 0.0
        if not self.waits(claim):
            claim.gone_at = None
        elif was and now < was - NEARLY:
            claim.gone_at = now
        if claim.gone_at is not None and not self._may_be(claim):
            seconds = now - claim.gone_at
            is_soon = seconds <= SOON_SAID + self._more
            must(is_soon, "for {:.1f} s: the lock of {} is gone; the message is not", seconds, claim.task_id)

    def _leads_again(self, claim: Claim) -> bool:
        """Whether it is a copy of a follower that has run in its leader's place, and whose process died: it takes the
        lock once more as it runs.
        """
        if claim.lock.follows is None or claim.died_at is None or self.world.ends[claim.task_id]:
            return False
        return claim.task_id in self.world.broker.ids() or self._runs(claim.task_id)

    def _lasts_as_long(self, claim: Claim, ends_at: float) -> None:
        left = ends_at - self.run.now
        what = claim.task_id, left, claim.seconds
        self.run.must(left <= claim.seconds + NEARLY, "the lock of {} lasts for {:.1f} s, of {:g}", *what)

    def _lasts_for_its_time(self, claim: Claim, owner: str) -> None:
        must, task_id = self.run.must, claim.task_id
        is_open = claim.is_sure and not claim.is_void and self.run.now < claim.taken_at + claim.seconds / 2
        # Whoever is told that sending failed gives the lock up, even if the broker has the message, and it runs.
        is_open = is_open and task_id not in self.entrance.unheard
        if self.world.ends.get(task_id) and int(task_id[1:]) not in self.world.answers.ended_as:
            return  # It is over without its own end: a follower may have taken the lock.
        if is_open and not self._forgot(claim.taken_at):
            must(owner == claim.owner, "the lock of {} is gone, which was to last for {:g} s", task_id, claim.seconds)

    def _is_provisional(self, key: str, owner: str, ends_at: float, value: bytes) -> None:
        """Check that the lock of a message that was never sent ends soon, or at once if its sender knows that."""
        task_id = inside.hold_of(value).task_id
        if (key, owner) not in self._unsent:
            self._unsent[key, owner] = self.run.now
            self.run.at(ends_at + NEARLY, lambda: None)  # This triggers a check at that time.
        since = self._unsent[key, owner]
        # A sender without an answer asks again.
        longest = UNCONFIRMED_TTL + (trouble.GIVEN_UP if self._is_excused(since - 1.0) else 0.0)
        is_soon, what = ends_at <= since + longest + NEARLY, (key, ends_at - since, task_id)
        self.run.must(is_soon, "{} is held for {:.1f} s for {}, which was never sent", *what)

    def _are_given_up(self, found: dict[str, tuple[str, float, bytes]]) -> None:
        """Check that nobody has a lock for a message whose caller was told that it is not sent."""
        owners, ids = (
            {owner for owner, _, _ in found.values()},
            {inside.hold_of(value).task_id for _, _, value in found.values()},
        )
        for task_id, call in self.calls.items():
            if call.failed_at is None or self._may_last(call.failed_at, self.run.now):
                continue
            # The broker may have the message all the same, and its other locks end with it.
            claim = self.claim_of(task_id)
            is_open = claim is not None and claim.scope != "until_expired"
            if not (is_open or self._is_excused(call.failed_at - SOON_SAID)):
                is_held = task_id in ids if claim is None else claim.owner in owners
                self.run.must(not is_held, "the lock of {} is held, whose caller was told that it is not sent", task_id)

    def _ends_with_its_process(self, claim: Claim, ends_at: float) -> None:
        """Check a message acknowledged early whose process died in its body: nobody else renews its lock."""
        if claim.is_late or claim.died_at is None or claim.begun_at is None or claim.task_id in self.world.broker.ids():
            return
        if claim.died_at - claim.begun_at > BEGUN + self._more and not self._is_excused(claim.begun_at):
            by = ends_at - claim.died_at
            may_last = by <= self.world.plan.ttl + NEARLY
            self.run.must(may_last, "the lock of {} outlives its process by {:.1f} s", claim.task_id, by)

    def _is_kept(self, claim: Claim) -> bool:
        """Whether its body runs in a process that is well and could renew."""
        if claim.scope != "until_executed" or claim.is_void or claim.is_ending or claim.over_at is not None:
            return False
        well = [it for it in self.world.bodies.each() if f"m{it.number}" == claim.task_id and it.process.is_well]
        return any(self.run.now - body.began > AT_ONCE and not self._is_excused(body.began - 1.0) for body in well)

    def _are_confirmed(self, found: dict[str, tuple[str, float, bytes]]) -> None:
        due = [it for it in self._confirmed if it[0] <= self.run.now]
        self._confirmed = [it for it in self._confirmed if it[0] > self.run.now]
        for _, since, seconds, process, claim in due:
            owner, ends_at, _ = found.get(claim.key, NOBODY)
            seconds = min(seconds, claim.least)  # A retry that was sent meanwhile may need it for less.
            is_well = process.alive and process.runs and not self._is_excused(since - 1.0)
            waits = claim.task_id in self.world.broker.ids() and self.waits(claim)
            if not (is_well and waits) or self._forgot(claim.sent_at) or self._is_begun(claim):
                continue
            if owner == claim.owner:
                what = claim.task_id, process.name, ends_at - self.run.now
                is_long = ends_at >= since + seconds - NEARLY - 1.0
                self.run.must(is_long, "the lock of {} is not confirmed by {}: {:.1f} s left", *what)

    def _to_confirm(self, process: Process, claim: Claim) -> None:
        due = self.run.now + CONFIRMED + self._more
        self._confirmed.append((due, self.run.now, claim.least, process, claim))
        self.run.at(due, lambda: None)

    @trouble.excuse
    def _is_begun(self, claim: Claim) -> bool:
        """Whether a process may have turned the hold into a lease."""
        return not claim.is_late and (claim.begun_at is not None or claim.task_id not in self.world.broker.ids())

    def waits(self, claim: Claim) -> bool:
        """Whether it certainly needs its lock."""
        is_open = claim.over_at is None and not (claim.is_ending or claim.is_void)
        is_sent = claim.is_sure or (not claim.sender.alive and claim.task_id not in self.entrance.unheard)
        has_place = claim.task_id in self.world.broker.ids() or self._runs(claim.task_id)
        return is_open and is_sent and has_place

    @trouble.excuse
    def _may_be(self, claim: Claim) -> bool:
        """Whether the lock may be gone: the server forgot it, or its process died between the release and the body."""
        kills = any("killed" in fault.kind for fault in self.world.plan.faults)
        is_at_start = claim.scope in ("until_executing", "until_and_while_executing")
        return self._forgot(claim.gone_at or 0.0) or (kills and is_at_start)

    def _runs(self, task_id: str) -> bool:
        return any(f"m{body.number}" == task_id for body in self.world.bodies.each())

    def awaits_an_end(self) -> bool:
        """Whether a lock without a message expires within half a minute."""
        return any(ends_at - self.run.now < UNCONFIRMED_TTL + NEARLY for _, ends_at, _ in self._found().values())

    def look_at_the_end(self) -> None:
        """Check, when everything is over, that each lock still held belongs to a lost message."""
        held, must = {owner: ends_at - self.run.now for owner, ends_at, _ in self._found().values()}, self.run.must
        for owner, seconds in held.items():
            claim = self.claims.get(owner) or self._leads(owner)
            must(claim is not None, "the lock of {}… is held for {:.1f} s, and was never sent", owner, seconds)
        for owner, claim in self.claims.items():
            if not (claim.scope == "until_expired" or self._is_nowhere(claim)):
                is_held, what = owner in held, (claim.task_id, held.get(owner, 0.0))
                must(not is_held, "the lock of {} is held for {:.1f} s, which is over", *what)

    @trouble.excuse
    def _is_nowhere(self, claim: Claim) -> bool:
        """Whether nobody could know that the message has ended: the broker lost it, or its worker died with it."""
        died = any("killed" in fault.kind for fault in self.world.plan.faults) and not claim.is_late
        is_unknown = any(f"m{number}" == claim.task_id for number, _ in self.world.bodies.unknown)
        has_failed = states.SUCCESS not in self.world.ends[claim.task_id]
        return claim.task_id in self.lost or (died and (has_failed or is_unknown))

    # Where things are

    def _found(self) -> dict[str, tuple[str, float, bytes]]:
        """By key: the owner of the hold, its expiry, and its value."""
        (server,) = self.world.servers
        late = self.run.now - server.clock()
        return {
            key: (holds.owner_of(value), ends_at / 1000 + late, value)
            for key, value, ends_at in server.living()
            if inside.OF_QUEUE in key and inside.part_of(key) == "run" and ends_at is not None
        }

    def has(self, key: str) -> str:
        """Who has this lock: the owner of its hold."""
        owner, _, _ = self._found().get(key, NOBODY)
        return owner

    def _brought_by(self, request: Any) -> Claim | None:
        if (lock := inside.lock_in(vars(request))) is None:
            return None
        claim = self.claims.get(owner := lock.owner)
        if claim is None and self.has(inside.of_lock(lock.key)) == owner:
            claim = self._leads(owner)
        return claim if claim is not None and claim.task_id == request.id else None

    def _claims_of(self, task_id: str) -> list[Claim]:
        return [claim for claim in self.claims.values() if claim.task_id == task_id and claim.scope != "until_expired"]

    def claim_of(self, task_id: str) -> Claim | None:
        return next((claim for claim in self.claims.values() if claim.task_id == task_id), None)

    def went_on(self, key: str, since: float) -> bool:
        """Whether a message that brought this lock has begun or ended since then. If it does not have the lock any
        more, it wakes one of its followers, whoever has it; so does a copy that comes after the first one has freed it.
        """
        moments = [(it.begun_at, it.over_at, it.died_at) for it in self.claims.values() if it.lock.key == key]
        return any(at is not None and at >= since for each in moments for at in each)

    def _may_last(self, over: float, at: float) -> bool:
        """Whether the lock of a message that ended then may still be held."""
        return at - over <= AT_ONCE + self._more

    @trouble.excuse
    def _is_excused(self, since: float) -> bool:
        return trouble.was_there(self.world, since, but=HARMLESS)

    @trouble.excuse
    def _forgot(self, since: float) -> bool:
        return self._forgot_at >= since or self._is_excused(self.run.now - NEARLY)
