"""Programs that send messages, each with a lock while it waits; and faults of them, their links and their messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from celery.worker import state
from kombu.exceptions import OperationalError

from tests.simulation import apps, fakes, inside
from tests.simulation.plan import Fault, Message
from tests.simulation.program import Program
from tests.simulation.putbacks import given_to_messages
from tests.simulation.queued import Queued
from tests.simulation.scheduler import Process

#: Number of sending programs.
SENDERS = 2


def begin(world: Any, queued: Queued) -> None:
    """Start the programs, each on its own host."""
    entrance = world.broker.entrance = Entrance(world)
    queued.entrance = entrance
    for number in range(SENDERS):
        world.senders.append(Program(world, world.host(f"web{number}"), f"web{number}", partial(_live, number, queued)))
    for sender in world.senders:
        sender.start()


def _live(number: int, queued: Queued, program: Program) -> None:
    """Send the messages of this program, each call in its own thread."""
    run, began = program.world.run, program.world.run.now
    mine = [message for message in program.world.plan.messages if message.number % SENDERS == number]
    for message in sorted(mine, key=lambda message: message.at):
        if message.at < began or f"m{message.number}" in queued.calls:
            continue  # Its previous process, which is gone, has sent this one.
        run.park(max(message.at - run.now, 0.0))
        fakes.Thread(target=_call, args=(program, queued, message), name=f"call{message.number}").start()


def _call(program: Program, queued: Queued, message: Message) -> None:
    package = program.process.package
    app = apps.app_of(package, program.world.settings)
    task, task_id = app.tasks[message.task], f"m{message.number}"
    args = message.key, message.number, message.words
    words = apps.words_of(message.sent)
    if (copied := words.pop("copies", "")) and (lock := queued.lock_of(copied)):
        # Like a program that copies all headers of a message to another one.
        queued.is_foreign(message)
        app.send_task(message.task, args, task_id=task_id, headers=inside.header_with(copied, lock))
        return
    given = given_to_messages(program.world.plan)
    signature = task.si(*args).set(task_id=task_id, **{**given, **{it: float(value) for it, value in words.items()}})
    if message.chained:
        signature.link(app.tasks["shop.after"].s(message.number).set(task_id=f"{task_id}-after"))
    call = queued.begins(message, program.process)
    try:
        result = signature.apply_async()
    except inside.public(package, "DuplicateTask") as duplicate:
        queued.is_duplicate(call, duplicate.task_id, duplicate.since)
    except (inside.public(package, "LockUnavailable"), OperationalError, OSError) as error:
        queued.fails(call, error)
    else:
        if isinstance(result, inside.public(package, "DuplicateResult")):
            queued.is_duplicate(call, result.id, result.since)
        elif result.id == task_id:
            queued.returns(call)
        else:
            queued.is_skipped(call, result)


class Entrance:
    """The broker's entrance for sending programs: it may refuse messages, be slow, or take a message without a reply.

    Attributes:
        refuses_until, unheard_until: until when it confirms nothing; in the second case it may have the message all the
            same.
        slow_until, slow_for: until when it is slow, and the seconds that it takes.
        doomed: for the next senders: whether each dies after the broker has its message, or before; and seconds until
            it is restarted.
    """

    def __init__(self, world: Any) -> None:
        self.world, self.run = world, world.run
        self.refuses_until = self.unheard_until = self.slow_until = self.slow_for = 0.0
        self.doomed: list[tuple[bool, float]] = []
        #: Ids of messages that it has, but whose senders got an error.
        self.unheard: set[str] = set()

    def __call__(self, message: dict[str, Any]) -> None:
        broker, run = self.world.broker, self.run
        process = run.current.process
        sender = next((it for it in self.world.senders if it.process is process), None)
        if sender is None:
            broker.put(message)
            return
        is_after, seconds = self.doomed.pop(0) if self.doomed else (None, 0.0)
        if is_after is not None:
            run.strikes("sender dies as it has sent" if is_after else "sender dies before it sends")
        if is_after is False:
            self._dies(process, sender, seconds)
        if run.now < self.slow_until:
            run.strikes("sending slow")
            # The delay comes before it has the message, or before it confirms that.
            before = run.rng.choice((0.0, 1.0))
            run.park(before * self.slow_for)
            broker.put(message)
            run.park((1.0 - before) * self.slow_for)
        elif run.now < self.refuses_until:
            run.strikes("sending refused")
            raise ConnectionRefusedError("the broker takes nothing")
        elif run.now < self.unheard_until:
            run.strikes("sending unheard")
            if run.rng.random() < 0.7:
                self.unheard.add(str(message["headers"].get("id")))
                broker.put(message)
            raise OSError("the broker does not answer")
        else:
            broker.put(message)
        if is_after:
            self._dies(process, sender, seconds)

    def _dies(self, process: Process, sender: Program, seconds: float) -> None:
        self.run.after(seconds + 0.01, sender.start)
        self.run.kill(process)


def _sender(world: Any, fault: Fault) -> Program:
    sender: Program = world.senders[fault.target % len(world.senders)]
    return sender


def _dies_as_it_sends(world: Any, fault: Fault, *, is_after: bool) -> bool:
    world.broker.entrance.doomed.append((is_after, fault.seconds))
    return False


def _until(world: Any, fault: Fault, *, name: str) -> bool:
    """Set this attribute of the entrance to when the fault is over."""
    setattr(world.broker.entrance, name, world.run.now + fault.seconds)
    return False


def _broker_slow(world: Any, fault: Fault) -> bool:
    """Be slow for a moment; messages that are sent in it take longer."""
    entrance = world.broker.entrance
    entrance.slow_until, entrance.slow_for = world.run.now + 1.0, fault.seconds
    return False


def _way(world: Any, fault: Fault, **how: Any) -> None:
    link = world.network.link(_sender(world, fault).host.name, world.servers[0].host.name)
    link.troubled_until = max(link.troubled_until, world.run.now + fault.seconds)
    for name, value in how.items():
        setattr(link, name, value)

    def well() -> None:
        link.delay = link.usual
        link.open()

    world.run.after(fault.seconds, well)


def _lost(world: Any, fault: Fault, number: int | None) -> bool:
    lost = world.broker.lose(number)
    for message in lost:
        headers = message["headers"]
        goes_on = bool(headers.get("retries")) or inside.header_of(headers).put_back is not None
        world.senders_queue.is_lost(str(headers.get("id")), goes_on=goes_on)
    return bool(lost)


def _revoked(world: Any, fault: Fault) -> bool:
    """Revoke a waiting or running message by `app.control.revoke`, which reaches each worker."""
    if ids := sorted(world.broker.ids()):
        chosen = ids[fault.target % len(ids)]
        world.run.note("is revoked", chosen, by="operator")
        world.revoked.add(chosen)
        state.revoked.add(chosen)
    return bool(ids)


def _forgotten(world: Any, fault: Fault) -> None:
    """The locks of waiting messages are gone, as if somebody had cleared them."""
    world.servers[0].clear(inside.OF_QUEUE)
    world.senders_queue.forget()


def _killed_at_a_start(world: Any, fault: Fault, *, of: str) -> bool:
    """Kill the process in which a body begins next, or its whole worker, soon after that."""
    world.senders_queue.doomed.append((of, fault.seconds))
    return False


BY_KIND: dict[str, Callable[[Any, Fault], object]] = {
    "sender dies": lambda world, fault: _sender(world, fault).kill_for(fault.seconds),
    "sender dies before it sends": partial(_dies_as_it_sends, is_after=False),
    "sender dies as it has sent": partial(_dies_as_it_sends, is_after=True),
    "sender cut": lambda world, fault: _way(world, fault, cut_there=True, cut_back=True),
    "sender cut back": lambda world, fault: _way(world, fault, cut_back=True),
    "sender cut there": lambda world, fault: _way(world, fault, cut_there=True),
    "sender slow": lambda world, fault: _way(world, fault, delay=(0.0, 2.0 if fault.target % 2 else 0.3)),
    "sending refused": partial(_until, name="refuses_until"),
    "sending unheard": partial(_until, name="unheard_until"),
    "sending slow": _broker_slow,
    "queue purged": lambda world, fault: _lost(world, fault, None),
    "message lost": lambda world, fault: _lost(world, fault, fault.target),
    "revoked": _revoked,
    "locks of messages cleared": _forgotten,
    "child killed at a start": partial(_killed_at_a_start, of="child"),
    "worker killed at a start": partial(_killed_at_a_start, of="worker"),
}
