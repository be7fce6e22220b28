"""A message as it was delivered, parsed once; and the parts of Celery's tasks and requests that this package uses.

What a message carries for us is in one header. Other people write into headers, too: if one of them puts a dictionary
`headers` into a message's headers, Celery takes that for all there are: `request.headers` shows nothing else. So our
header is at the top level of the message, and only this module reads it, as the message was delivered. It names the
task id that it was made for: copied to another message, it has no effect. `header` writes it.

A message belongs to a *sending*: two messages of one sending and attempt are the same message. A task id is not enough:
users freeze signatures and send them again, a chain object that is sent twice has the same id in its last step
(Celery 5.7), and tasks of one lock may be given one id. A sending is named by the id and by random digits in the
header, so that its sender knows the name, too. A message without them, from a program that does not have this package,
is named by the id, by its place in its canvas (root and parent), and by the ids of the tasks that wait for it: in a
canvas that is sent again these are new, and must not wait forever.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_singleton_lock import cleaned, clock
from celery_singleton_lock.holder import NOBODY, Holder, is_owner
from celery_singleton_lock.keys.key import is_key
from celery_singleton_lock.options.rules import MAX_LIMIT, is_whole
from celery_singleton_lock.options.task import Options
from celery_singleton_lock.stores.base import MAX_GIVEN_UP

#: The name of the header: a dictionary of `id`, the task id, and what else the message needs: `sent` and `replaced`,
#: the random part of its sending's name, and the name of the sending that it replaces; `call`, the lock options of this
#: call; `queue`, the lock that was taken when it was sent (`queue_lock`); `put_back`, see `Note`; `due` and `entry`, of
#: a tick of beat. A header without an `id` was written by hand, and is the `call` itself.
HEADER = "singleton_lock"

#: The owner that the worker's main process gives a delivery is in the delivery info, where no sender can write.
OWNER = "singleton_owner"

#: Why a message is sent again: another task holds its lock; the lock server does not answer; it runs elsewhere, and the
#: copy waits in case that worker dies; it ends as another message, which has not ended yet.
Reason = Literal["conflict", "unavailable", "copy", "follows"]

#: Reasons to send a message again that has not begun, and may still expire. The header counts these.
NOT_BEGUN: tuple[Reason, ...] = ("conflict", "unavailable", "follows")

#: The highest number in an order: a float holds it exactly.
MAX_NUMBER = 2**53

_DIGITS = re.compile(r"[0-9a-f]{32}", re.ASCII)

#: A task id that a record's name shows; a longer one, or one with other characters, is left out.
_SHOWN = re.compile(r"[\w.-]{1,64}", re.ASCII)

_NOTHING: Mapping[str, Any] = {}


def digest(*parts: object) -> str:
    """A name made of parts that JSON can hold, in hex digits."""
    return hashlib.blake2b(ascii(parts).encode(), digest_size=16).hexdigest()


def record_name(task: str, task_id: object, sending: str) -> str:
    """The name of the record of a message of this task; it begins with the task id, which people know."""
    own = digest(task, sending)
    # What has the same id and key is seldom more than one message, and each character of a key costs memory.
    return f"{task_id}:{own[:10]}" if isinstance(task_id, str) and _SHOWN.fullmatch(task_id) else f"-:{own}"


class RequestLike(Protocol):
    """A message on its way through a worker, or a call by `apply`: Celery's `Context`.

    What a message contains may be anything: such parts are `Any`, and are cleaned where they are read.
    """

    id: Any
    root_id: Any
    parent_id: Any
    retries: Any
    eta: Any
    expires: Any
    headers: Any
    callbacks: Any
    errbacks: Any
    chain: Any
    chord: Any
    #: About this delivery: the worker or `apply` writes it, and no sender can.
    delivery_info: Any
    properties: Any
    hostname: Any
    is_eager: bool
    called_directly: bool


class TaskLock(NamedTuple):
    """The lock that a call of a task takes.

    Attributes:
        options: how it is taken.
        key: the lock's key.
        label: what the digest in the key is made of, in a few words; empty if nobody is to see that.
    """

    options: Options
    key: str
    label: str = ""


class TaskLike(Protocol):
    """An exclusive task."""

    name: str
    ignore_result: bool
    acks_late: bool
    acks_on_failure_or_timeout: bool
    tracks_started: ClassVar[bool]

    @property
    def app(self) -> Any: ...

    @property
    def request(self) -> RequestLike: ...

    @property
    def backend(self) -> Any: ...

    @property
    def retry(self) -> Callable[..., Any]: ...

    @property
    def signature_from_request(self) -> Callable[..., Any]: ...

    def lock_options(self, request: RequestLike) -> Options | None: ...

    def lock_of(self, request: RequestLike, args: Any, kwargs: Any) -> TaskLock | None: ...


class Waits(NamedTuple):
    """The lock that a copy waits for, and how many may hold it at once."""

    key: str
    limit: int

    @classmethod
    def read(cls, value: object) -> Waits | None:
        """Read a part of a header; None if others wrote it."""
        if not isinstance(value, (list, tuple)) or len(value) != len(cls._fields):
            return None
        key, limit = value
        is_ours = isinstance(key, str) and key == cleaned.key(key) and is_whole(limit, 1, MAX_LIMIT)
        return cls(key, limit) if is_ours else None


class Target(NamedTuple):
    """The attempt of a message whose end another message waits for: it has met that message as it ran, or as it waited.

    Attributes:
        replaced, retries: which of the messages of that sending.
        since: when it got the lock of its run, which distinguishes its deliveries; 0 if that is not known.
        goes_on: whether an earlier attempt has ended: this one may run later, while others have the lock.
        sent: when it was sent, if it was met as it waited; otherwise 0. Seconds since the epoch, as `since`.
    """

    task_id: str
    sending: str
    replaced: int
    retries: int
    since: float
    goes_on: bool = False
    sent: float = 0.0

    @classmethod
    def of(cls, holder: Holder) -> Target | None:
        """The holder of a lock, or the task from which an operator has taken it; None if that is not a task."""
        if holder.task_id is None or not holder.sending:
            return None
        replaced = NOBODY - holder.replaced if holder.is_nobody else holder.replaced
        # If no process has the lock, it is kept for an attempt that has not begun, or rests.
        since = holder.since if holder.pid or holder.is_nobody else 0.0
        return cls(holder.task_id, holder.sending, replaced, holder.retries, since)

    @classmethod
    def waiting(cls, holder: Holder) -> Target | None:
        """The holder of a queue lock, as it is before it runs; None if its sending, or that it is one, is not known."""
        if holder.task_id is None or holder.sending == holder.task_id:
            return None
        return cls(holder.task_id, holder.sending, 0, 0, 0.0, sent=holder.since)

    @classmethod
    def read(cls, value: object) -> Target | None:
        """Read the value of a header; None if others wrote it."""
        if not isinstance(value, (list, tuple)) or len(value) < len(cls._fields):
            return None
        task_id, sending, replaced, retries, since, goes_on, sent = value[: len(cls._fields)]
        if not (isinstance(task_id, str) and isinstance(sending, str) and task_id and sending):
            return None
        return cls(
            cleaned.text(task_id),
            cleaned.text(sending),
            cleaned.count(replaced),
            cleaned.count(retries),
            cleaned.seconds(since),
            goes_on is True,
            cleaned.seconds(sent),
        )

    def message(self, task_name: str) -> str:
        """The name of its message (see `Holder.message`), if that is a message of the task `task_name`."""
        record = record_name(task_name, self.task_id, self.sending)
        return Holder(
            self.task_id, retries=self.retries, replaced=self.replaced, sending=self.sending, record=record
        ).message

    def as_sent(self) -> Target:
        """The message as it was sent, before its first attempt."""
        return self._replace(replaced=0, retries=0, since=0.0, goes_on=False)

    def name_of_heir(self, task_name: str) -> Holder:
        """The name under which the message is recorded that runs in its place, since it is gone without an end."""
        return Holder(record=f"heir:{self.message(task_name)}:{self.since:.6f}")

    def name_of_begin(self, task_name: str) -> Holder:
        """The name under which it is recorded since when this attempt has had the lock."""
        return Holder(record=f"began:{self.message(task_name)}")

    def has_begun_as(self, holder: Holder) -> bool:
        """Whether the holder of a lock is this attempt; not if the lock is merely kept for it."""
        attempt = holder.sending, holder.replaced, holder.retries
        return holder.pid != 0 and attempt == (self.sending, self.replaced, self.retries)

    def next_attempt(self) -> Target:
        return self._replace(retries=self.retries + 1, since=0.0, goes_on=True)

    def attempt_before(self) -> Target:
        return self._replace(retries=max(self.retries - 1, 0))


class Note(NamedTuple):
    """What a message that was put back has to know; of one that was not, each part says nothing.

    Attributes:
        counts: how often this attempt of the message was put back, by reason.
        waits: the lock that it waits for, and may have been woken for.
        since: when this attempt first met a conflict, seconds since the epoch; 0 if it met none.
        joins: the message that it is to end as, which had its lock.
        follows: the message that it is to end as, which had the lock that this one was to get when it was sent.
        given_up: the owners under which earlier deliveries of this attempt have asked for the lock without an answer;
            the latest sixteen.
        redelivered: whether a message of which this is a copy was delivered again.
        returned: how often the broker had taken the attempt back when it was put back, and how often it had been
            dead-lettered by then.
    """

    counts: Mapping[str, int] = {}
    waits: Waits | None = None
    since: float = 0.0
    joins: Target | None = None
    follows: Target | None = None
    given_up: tuple[str, ...] = ()
    redelivered: bool = False
    returned: tuple[int, int] | None = None

    @classmethod
    def read(cls, known: Mapping[str, Any]) -> Note:
        """Read a part of a header; what others wrote counts as nothing."""
        owners = known.get("given_up")
        return cls(
            {reason: count for reason in NOT_BEGUN if (count := cleaned.count(known.get(reason)))},
            Waits.read(known.get("waits")),
            cleaned.seconds(known.get("since")),
            Target.read(known.get("joins")),
            Target.read(known.get("leader")),
            tuple(filter(is_owner, owners))[-MAX_GIVEN_UP:] if isinstance(owners, (list, tuple)) else (),
            known.get("redelivered") is True,
            _two_counts(known.get("returned")),
        )

    def waits_on(self, prefix: str) -> Waits | None:
        """The lock that it waits for, if that is one of this worker's."""
        return self.waits if self.waits is not None and is_key(prefix, self.waits.key) else None

    def since_now(self) -> float:
        """When this attempt first met a conflict: now, if it has met none before."""
        return min(self.since or math.inf, clock.wall())

    def seconds_in_line(self, now: float) -> float:
        """Seconds since this attempt first met a conflict; `now` in seconds since the epoch."""
        return max(now - self.since, 0.0) if self.since else 0.0


#: Of a message that was not put back.
NO_NOTE = Note()


class Message(NamedTuple):
    """A message of one delivery, or an eager call.

    Attributes:
        id: the task id.
        sending: the name of the sending that it belongs to.
        is_plain: whether it is delivered for the first time, and waits for nothing, follows nothing, and has no lock
            yet: it can only ask for its lock, and run.
        carried: what is in our header. Others may have written it: each part is checked where it is used.
        retries, replaced: how often the task was retried, and replaced, before.
        owner: the owner that the main process gave the delivery; None if there is no such process.
        may_have_begun: whether an earlier delivery of this attempt may be running it, or have ended it: it was
            delivered again, or is the copy of a message that was.
        note: what it carries since it was put back.
        was_put_back: whether it was.
        number: the number that it has in the order of its key, whichever attempt got it; None if that is not known.
        is_applied: whether it is a call by `apply` in this process.
        expires: when.
    """

    id: Any
    sending: str
    is_plain: bool
    carried: Mapping[str, Any]
    retries: int
    replaced: int
    owner: str | None
    may_have_begun: bool
    is_applied: bool
    expires: Any
    note: Note = NO_NOTE
    was_put_back: bool = False
    number: int | None = None

    @classmethod
    def of(cls, request: RequestLike) -> Message:
        """The message of a request."""
        carried = carried_by(request)
        known = carried.get("put_back")
        of_delivery = request.delivery_info or _NOTHING
        owner = of_delivery.get(OWNER)
        is_redelivered = bool(of_delivery.get("redelivered"))
        message = cls(
            id=request.id,
            sending=_sending_of(request, carried),
            is_plain=not (is_redelivered or "queue" in carried or known is not None),
            carried=carried,
            retries=cleaned.count(request.retries),
            replaced=cleaned.count(getattr(request, "replaced_task_nesting", 0)),
            owner=owner if owner is not None and is_owner(owner) else None,
            may_have_begun=is_redelivered,
            is_applied=of_delivery.get("is_eager") is True,
            expires=request.expires,
        )
        return message._noting(known) if isinstance(known, dict) else message

    def put_back_count(self, reason: Reason) -> int:
        """How often this attempt of the message was put back for `reason`."""
        return self.note.counts.get(reason, 0)

    @property
    def sent(self) -> str | None:
        """The random part of its sending's name; None if it has none, or others wrote it."""
        return _digits(self.carried.get("sent"))

    def comes_too_late(self) -> bool:
        """Whether it has expired, and reaches its task all the same, since it may have begun before."""
        expires = maybe_iso8601(self.expires) if self.may_have_begun else None
        return expires is not None and maybe_make_aware(expires).timestamp() < clock.wall()

    def _noting(self, known: Mapping[str, Any]) -> Message:
        """The same message, which was put back, as its header says."""
        number, of_attempt = known.get("arrived"), known.get("retries")
        numbered = self._replace(number=number if is_whole(number, 1, MAX_NUMBER) else None)
        if isinstance(of_attempt, bool) or of_attempt != self.retries:
            return numbered
        note = Note.read(known)
        may_have_begun = self.may_have_begun or note.redelivered
        return numbered._replace(note=note, was_put_back=True, may_have_begun=may_have_begun)


def carried_by(request: RequestLike) -> Mapping[str, Any]:
    """Our header of a request's message."""
    attributes = request.__dict__  # Celery makes each header of a message one.
    if HEADER in attributes:
        return _parts(attributes[HEADER], request.id)
    if request.is_eager and isinstance(request.headers, Mapping):  # `apply` puts what it is given nowhere else.
        return _parts(request.headers.get(HEADER), request.id)
    return _NOTHING


def carried_in(headers: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same, from the headers of a message as it was delivered."""
    return _parts(headers.get(HEADER), headers.get("id"))


def ids_in(part: Any) -> Iterator[str]:
    """The ids of the tasks in a part of a canvas."""
    if isinstance(part, Mapping):
        for name, value in part.items():
            if name == "task_id":
                yield str(value)
            else:
                yield from ids_in(value)
    elif isinstance(part, (list, tuple)):
        for value in part:
            yield from ids_in(value)


def sending_in(carried: Mapping[str, Any]) -> str | None:
    """The sending of a message with this header; None if the header does not tell."""
    if "replaced" in carried and (of_replaced := _digits(carried["replaced"])) is not None:
        return of_replaced
    if "sent" in carried and (sent := _digits(carried["sent"])) is not None:
        return digest(sent, carried.get("id"))
    return None


def _sending_of(request: RequestLike, carried: Mapping[str, Any]) -> str:
    if (sending := sending_in(carried)) is not None:
        return sending
    # A retry of a message without a parent, or without a root, gets its own id for that.
    parent = request.parent_id if request.parent_id != request.id else None
    return digest(None, request.id, request.root_id or request.id, parent, _followers_of(request))


def _followers_of(request: RequestLike) -> list[str]:
    """The ids of the tasks that wait for this one's end."""
    if not (request.chain or request.chord or request.callbacks or request.errbacks):
        return []
    return sorted({*ids_in([request.chain, request.chord, request.callbacks, request.errbacks])})


def _parts(header: Any, task_id: object) -> Mapping[str, Any]:
    if isinstance(header, dict) and "id" in header:
        return header if task_id is not None and header["id"] == task_id else _NOTHING
    return _NOTHING if header is None else {"call": header}


def _two_counts(value: object) -> tuple[int, int] | None:
    if not isinstance(value, list) or len(value) != 2:
        return None
    return cleaned.count(value[0]), cleaned.count(value[1])


def _digits(part: object) -> str | None:
    return part if isinstance(part, str) and _DIGITS.fullmatch(part) else None
