"""Messages that end as another message, and what must hold: they end as the task that they joined, or as the message
that they follow.

Each end shows which message that is: a body returns its message's number, or names it in its error.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from celery import states

from tests.simulation import apps, holds, inside, trouble
from tests.simulation.parked import Copy
from tests.simulation.plan import Message
from tests.simulation.queued import AT_ONCE, HARMLESS, Claim
from tests.simulation.world import Running

#: Seconds of the simulation between two looks.
OFTEN = 0.2

#: Seconds within which a copy in line learns that the other message has ended; and more for each copy before it.
HEARD, EACH = 1.5, 0.3

#: Faults that delay no end.
NO_DELAY = (*HARMLESS, "results slow")


@dataclass(frozen=True, slots=True)
class _Other:
    """The message whose end another message must have.

    Attributes:
        number: of the message.
        group: the same for all messages that wait for the same end.
        since: when a copy said so.
    """

    number: int
    group: tuple[Any, ...]
    since: float


@dataclass(eq=False)
class Answers:
    """The checker of these messages."""

    world: Any
    #: By number of a message: the message as which it has ended.
    ended_as: dict[int, int] = field(default_factory=dict)
    #: By number and attempt: the messages whose ends it has waited for one after the other, according to its copies.
    _others: dict[tuple[int, int], list[_Other]] = field(default_factory=dict)
    #: By group: the messages that have run themselves.
    _heirs: dict[tuple[Any, ...], list[int]] = field(default_factory=lambda: defaultdict(list))
    #: By copy: the last attempt of the message that it had joined of whose end the lock server knew as the copy began.
    _known: dict[tuple[int | str, str], int] = field(default_factory=dict)
    #: By number and attempt: the body that began last.
    _begun: dict[tuple[int, int], Running] = field(default_factory=dict)
    #: By number of a message: when another message last ended as it.
    _passed_on_at: dict[int, float] = field(default_factory=dict)
    #: By number of a follower: when it was last seen to be behind a copy that was woken in its place.
    _behind_at: dict[int, float] = field(default_factory=dict)
    #: By message, and the one that it has joined: when it first said so.
    _joined_at: dict[tuple[str, str], float] = field(default_factory=dict)
    #: By id: the bodies of a message; and those that ran in its place, each after which of its bodies.
    _bodies: dict[str, list[Running]] = field(default_factory=lambda: defaultdict(list))
    _after: dict[str, list[tuple[int | str, Running]]] = field(default_factory=lambda: defaultdict(list))
    _next_look: float = 0.0

    def __post_init__(self) -> None:
        self.run = self.world.run
        self.world.broker.on_put.append(self._put)
        self.world.bodies.watched.append((self._body_begins, lambda *_: None))
        self.world.bodies.watched.append((self._has_no_other_heir, lambda *_: None))
        self.world.on_followed.append(self._goes_on)
        self.world.parked.on_begin.append(self._copy_begins)

    # What the world sees

    def note_end(self, task_id: str, state: str, result: Any) -> None:
        """A final state is stored."""
        own, number = number_of(task_id), number_in(state, result)
        is_lost = isinstance(result, Mapping) and result.get("exc_type") == "WorkerLostError"
        process = self.run.current.process if self.run.current is not None else None
        if own is not None and process is not None and process.is_child:
            self.run.must(not is_lost, "message {} ends as one whose process has died", own)
        if own is None or number is None:
            return
        before = self.ended_as.setdefault(own, number)
        if self._is_sure(own):
            self.run.must(
                before == number, "message {} ends as message {}, and then as message {}", own, before, number
            )
        if number != own:
            self._passed_on_at[number] = self.run.now
            self._is_another(own, number, state)

    def _put(self, message: dict[str, Any], is_taken: bool) -> None:
        """A copy is put back, and says whose end its message waits for."""
        headers: Mapping[str, Any] = message.get("headers") or {}
        own, attempt = number_of(headers.get("id")), headers.get("retries") or 0
        if not is_taken or own is None:
            return
        header = inside.header_of(headers)
        if header.put_back is not None and header.put_back.retries == attempt and (joins := header.put_back.joins):
            self._joined_at.setdefault((headers["id"], joins.task_id), self.run.now)
            self._waits_for(own, attempt, joins.task_id, ("joins", joins.task_id, joins.retries, joins.since))
        elif header.queue is not None and (leader := _leader_in(header, attempt)) is not None:
            assert header.queue.follows is not None
            self._waits_for(own, attempt, leader, ("follows", header.queue.follows.sending))

    def _waits_for(self, own: int, attempt: int, task_id: str, group: tuple[Any, ...]) -> None:
        number = number_of(task_id)
        before = self._last_other(own, attempt)
        if number is not None and number != own and (before is None or before.number != number):
            self._others.setdefault((own, attempt), []).append(_Other(number, group, self.run.now))

    def _copy_begins(self, request: Any) -> None:
        """Keep what the lock server knows by now: the copy finds it, if it looks before it asks for the lock."""
        headers = request.message.headers
        if (own := number_of(request.id)) is None:
            return
        other = self._other_of(own, headers.get("retries") or 0, headers)
        last = None if other is None else self._last_ended(other.number)
        if last is not None and self.world.bodies.has_record(last[0]):
            # If the same copy is delivered again, the first one may not find it.
            self._known.setdefault(_copy_of(own, headers), last[0].attempt)

    def _body_begins(self, body: Running, request: Any) -> None:
        """Check a message that runs itself: the message that it waited for must be without an end."""
        if not isinstance(body.number, int):
            return
        self._begun[body.number, body.attempt] = body
        headers = vars(request)
        other = self._other_of(body.number, body.attempt, headers)
        if other is None or body.attempt != self._first_attempt(body.number):
            return
        if self.world.bodies.begun[body.number] > 1:
            return  # A message that ran in its place after it died may have ended meanwhile.
        for number in (other.number, *self._heirs[other.group]):
            if number == body.number:
                continue
            has_ended = self._had_ended(number, other.since)
            what = body.number, number
            self.run.must(not has_ended, "message {} runs, and message {}, as which it is to end, has ended", *what)
        self._is_alone(body, other, headers)
        self._leads(body, request)
        self._heirs[other.group].append(body.number)

    def _other_of(self, own: int, attempt: int, headers: Mapping[str, Any]) -> _Other | None:
        """The message whose end this copy waits for, as far as it can know.

        If it is an older copy that was delivered again, a later one may have joined or followed another message. This
        one finds that message only if it has run in the place of the one before.
        """
        others = self._others.get((own, attempt), [])
        if not others:
            return None
        header = inside.header_of(headers)
        if others[-1].group[0] == "follows":
            named = _leader_in(header, attempt)
        elif header.put_back is None:
            return None  # This may be the original message, delivered again: it has not joined anything yet.
        else:
            named = header.put_back.joins.task_id if header.put_back.joins is not None else None
        number = number_of(named)
        at = max((at for at, other in enumerate(others) if other.number == number), default=len(others) - 1)
        while at + 1 < len(others) and others[at + 1].number in self._heirs[others[at].group]:
            at += 1
        return others[at]

    def _last_other(self, own: int | None, attempt: int) -> _Other | None:
        others = [] if own is None else self._others.get((own, attempt), [])
        return others[-1] if others else None

    def _goes_on(self, value: Any, number: int) -> None:
        """Check the task after a message, which runs with the message's return value."""
        given, ended_as = number_in(states.SUCCESS, value), self.ended_as.get(number)
        if ended_as is not None and self._is_sure(number):
            what = number, ended_as, given
            self.run.must(given == ended_as, "message {} ends as message {}, and what follows goes on with {}", *what)

    # What must hold

    def _is_another(self, own: int, number: int, state: str) -> None:
        """Check that it ends as a run of the same job that was not over before it was sent."""
        _, message = self.world.sent[own]
        _, other = self.world.sent.get(number, ("", None))
        must = self.run.must
        is_same = other is not None and (other.task, other.key) == (message.task, message.key)
        must(is_same, "message {} ends as message {}, which is another job", own, number)
        if other is None:
            return
        waited = message.task in apps.JOINS or any(of == own for of, _ in self._others)
        must(waited, "message {} ends as message {}, which it neither joined nor follows", own, number)
        asked = self.world.asked_at[own] - self._kept_for(message)
        if not self._is_excused(asked - AT_ONCE):
            is_so = (state == states.FAILURE) == ("fails" in apps.words_of(other.words))
            must(
                is_so and any(at >= asked for at in self._ends_of(other)),
                "message {} ends as message {}, whose run was over before",
                own,
                number,
            )

    def _kept_for(self, message: Message) -> float:
        """Seconds for which a lock may be held after the end of its body."""
        options = apps.TASKS[message.task]
        kept = options.get("lock_at_least_for", 0.0)
        if options.get("lock_scope") == "until_expired":
            kept = apps.KEEPS_OUT
        return float(AT_ONCE + self._more + kept)

    def _ends_of(self, message: Message) -> Iterator[float]:
        """The times at which bodies of a message ended for good."""
        last = int(apps.words_of(message.words).get("retries", "0"))
        for (number, attempt), (_, at) in self.world.bodies.ended.items():
            if number == message.number and attempt >= last:
                yield at

    def _had_ended(self, number: int, since: float) -> bool:
        """Whether this message has ended since then, and the lock server knows it."""
        bodies, (_, message) = self.world.bodies, self.world.sent.get(number, ("", None))
        if message is None:  # Its sender died before it was sent.
            return False
        last = int(apps.words_of(message.words).get("retries", "0"))
        ended, at = bodies.ended.get((number, last), (None, 0.0))
        if ended is None or at < since or at not in [*self._ends_of(message)]:
            return False
        # With this scope nothing names its run to those that follow it: they see only an end that was stored.
        by_time = apps.TASKS[message.task].get("lock_scope") == "until_expired"
        if by_time and not self.world.ends.get(f"m{number}"):
            return False
        # Celery may store another end if its process died before it had stored this one.
        is_another = number not in self.ended_as and self.world.ends.get(f"m{number}")
        if (number, last) in bodies.unknown or self.world.plan.forgets or is_another:
            return False
        was_over = ended.lease.trusted_until < ended.process.host.clock(at)
        return not (was_over or self._is_excused(min(at, since) - AT_ONCE))

    def _is_alone(self, body: Running, other: _Other, headers: Mapping[str, Any]) -> None:
        """Check that the message that it waited for does not go on."""
        task_id, message = self.world.sent.get(other.number, ("", None))
        if message is None or self._is_excused(other.since - AT_ONCE):
            return
        if other.group[0] == "joins":
            last, at = self._last_ended(other.number) or (body, 0.0)
            attempt = last.attempt
            if other.since < at and self._known.get(_copy_of(body.number, headers)) == attempt:
                goes_on = (
                    attempt < int(apps.words_of(message.words).get("retries", "0"))
                    and task_id in self.world.broker.ids()
                )
                goes_on = goes_on and not (self._has_died(other.number, attempt + 1) or self.world.ends.get(task_id))
                what = body.number, other.number
                self.run.must(not goes_on, "message {} runs, and message {}, which it joined, is to go on", *what)
            return
        claim, queued = self._claim_of(task_id), self.world.senders_queue
        waits = (
            claim is not None and claim.over_at is None and queued.waits(claim) and queued.has(claim.key) == claim.owner
        )
        # With this scope, the lock may expire before its message has begun.
        runs = apps.TASKS[message.task]["lock_scope"] != "until_expired" and self._runs(other.number)
        is_over = not (waits or runs)
        what = body.number, other.number
        self.run.must(is_over, "message {} runs, and message {}, which it follows, is not over", *what)

    def _has_no_other_heir(self, body: Running, _: Any) -> None:
        """Check that of all messages that have joined one that died in a retry, whichever attempt each has joined, one
        runs in its place.
        """
        task_id, put_back = f"m{body.number}", inside.put_back_in(self.run.current.delivered)
        self._bodies[task_id].append(body)
        joined = put_back.joins.task_id if put_back is not None and put_back.joins is not None else ""
        if not (runs := self._bodies[joined]) or len(self._bodies[task_id]) > 1:
            return
        last, since = runs[-1], self._joined_at[task_id, joined]
        # The holders of a first attempt that was delivered twice may each have an heir.
        if last.attempt > 0 and [run.attempt for run in runs].count(last.attempt) == 1:
            heirs = {heir for heir, after in self._after[joined] if after is last} - {body.number}
            ended = [heir for heir in heirs if isinstance(heir, int) and self._had_ended(heir, since)]
            self.run.must(not ended, "message {} runs in the place of {}, as {} has done", task_id, joined, ended)
        self._after[joined].append((body.number, last))

    def _last_ended(self, number: int) -> tuple[Running, float] | None:
        """The last body of a message that has ended, and when."""
        ended = [it for (of, _), it in self.world.bodies.ended.items() if of == number]
        return max(ended, key=lambda it: it[1], default=None)

    def _has_died(self, number: int, attempt: int) -> bool:
        """Whether the process of this attempt is gone, maybe before its body began: a message that joined it runs in
        its place, even if the attempt is to come again.
        """
        if (body := self._begun.get((number, attempt))) is not None:
            return not body.process.alive
        return any((f"m{number}", attempt) in it.had for it in self.run.processes if not it.alive)

    def _leads(self, body: Running, request: Any) -> None:
        """Check that a message that runs in its leader's place keeps others from being sent, as its scope says."""
        lock, asked_at = inside.lock_in(vars(request)), self.world.asked_at[body.number]
        if lock is None or lock.follows is None or lock.scope != "until_executed":
            return
        if not self._is_excused(asked_at - AT_ONCE):
            has_it = self.world.senders_queue.has(inside.of_lock(lock.key)) == lock.owner
            self.run.must(
                has_it, "message {} runs in the place of the one that it follows, without its lock", body.number
            )

    @trouble.excuse
    def is_behind_another(self, request: Any) -> bool:
        """Whether a copy is in line for a lock that its leader has lost: the leader wakes it all the same."""
        other = self._last_other(number_of(request.id), request.context.retries or 0)
        if other is None or other.group[0] != "follows":
            return False
        claim = self._claim_of(f"m{other.number}")
        return claim is not None and self.world.senders_queue.has(claim.key) != claim.owner

    def _claim_of(self, task_id: str) -> Claim | None:
        queued = self.world.senders_queue
        found: Claim | None = None if queued is None else queued.claim_of(task_id)
        return found

    def _runs(self, number: int) -> bool:
        """Whether a body of this message runs in a process that is well, and holds its lock."""
        return any(it.number == number and it.process.is_well and it.lease.held for it in self.world.bodies.each())

    def look(self) -> None:
        """Check, whenever time is about to advance, that every waiter learns of the end."""
        if self.run.now < self._next_look or not self._others:
            return
        self._next_look = self.run.now + OFTEN
        waits = {}
        for copy in self.world.parked.in_line():
            own = number_of(copy.request.id)
            attempt = copy.request.context.retries or 0
            if own is not None and (other := self._last_other(own, attempt)) is not None:
                waits[own] = copy, other
        trouble_ends = trouble.last_end(self.world, but=NO_DELAY)
        for own, (copy, other) in waits.items():
            if (ended_at := self._heard_at(other)) is None or not self.world.parked.has_room(copy):
                continue
            if self._runs(other.number):
                continue  # It runs again: its process was gone before anybody knew of the end of an attempt.
            is_behind = self.world.parked.is_behind(copy, ended_at) or self._has_missed_it(copy, other, ended_at)
            if other.group[0] == "follows" and is_behind:
                self._behind_at[own] = self.run.now
            # One after the other: each wakes the next.
            since = max(ended_at, copy.at, trouble_ends, self._passed_on_at.get(other.number, 0.0))
            since = max(since, self._behind_at.get(own, 0.0))
            seconds = self.run.now - since
            self.run.must(
                seconds <= HEARD + EACH * len(waits) + self._more,
                "for {:.1f} s: message {} is in line, and message {}, as which it is to end, has ended",
                *(seconds, own, other.number),
            )

    def _has_missed_it(self, copy: Copy, other: _Other, ended_at: float) -> bool:
        """Whether its process may not have listened as the other message ended, because of a fault, and a third one has
        the lock by now: then the copy is woken when that one has ended. Two seeds of ten thousand or none: not counted.
        """
        if not trouble.was_there(self.world, ended_at - inside.MAX_PAUSE, but=NO_DELAY):
            return False
        values = holds.on_most(self.world.servers)
        held = inside.is_held_by(values, copy.key)
        return len(held) >= copy.limit and all(self._is_of_a_third(value, other) for value in held.values())

    def _is_of_a_third(self, value: bytes, other: _Other) -> bool:
        """Whether a hold is that of a third message, or of a retry that was never sent, since its sender died."""
        queued, task_id = self.world.senders_queue, inside.hold_of(value).task_id
        was_never_sent = queued is not None and holds.owner_of(value) not in queued.claims
        return task_id != "" and (task_id != f"m{other.number}" or was_never_sent)

    @property
    def _more(self) -> float:
        return float(20 * self.world.plan.latency)

    def _heard_at(self, other: _Other) -> float | None:
        """When a message ended since somebody waits for it; None if it has not."""
        _, message = self.world.sent.get(other.number, ("", None))
        if message is None or self.ended_as.get(other.number) != other.number:
            return None
        return max((at for at in self._ends_of(message) if at >= other.since), default=None)

    def _first_attempt(self, number: int) -> int:
        return min((attempt for of, attempt in self._others if of == number), default=0)

    def _is_sure(self, own: int) -> bool:
        """Whether no fault of its process or of a lock server may have caused two reports of its end."""
        return not self._is_excused(self.world.asked_at.get(own, 0.0)) and self.world.bodies.succeeded[own] < 2

    @trouble.excuse
    def _is_excused(self, since: float) -> bool:
        return trouble.was_there(self.world, since, but=NO_DELAY) or self._locks_were_cleared

    @property
    def _locks_were_cleared(self) -> bool:
        cleared = "locks of messages cleared"
        return any(it.kind == cleared and it.at <= self.run.now for it in self.world.plan.faults)


def number_of(task_id: object) -> int | None:
    """The number of the message with this id; None if it is not a message of the plan."""
    number = str(task_id).removeprefix("m")
    return int(number) if str(task_id).startswith("m") and number.isdigit() else None


def number_in(state: str, result: Any) -> int | None:
    """The number of the message whose body ended like this; None if no body did."""
    if state == states.SUCCESS:
        return result[0] if isinstance(result, list) else result if isinstance(result, int) else None
    if state == states.FAILURE and isinstance(result, Mapping) and result.get("exc_type") == "ValueError":
        found = re.search(r"message (\d+) fails", str(result.get("exc_message")))
        return None if found is None else int(found[1])
    return None


def _copy_of(number: int | str, headers: Mapping[str, Any]) -> tuple[int | str, str]:
    """The same for all deliveries of a copy, and for no other copy."""
    return number, repr(inside.header_of(headers).put_back)


def _leader_in(header: inside.Header, attempt: int) -> str | None:
    """The id of the message that a copy follows, as this copy says; None if it follows none."""
    if header.queue is None or header.queue.follows is None:
        return None
    put_back = header.put_back or inside.PutBack()
    return ((put_back.leader if put_back.retries == attempt else None) or header.queue.follows).task_id
