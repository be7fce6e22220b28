"""A simulation: a plan is carried out, and checked meanwhile and at its end."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from celery import states
from celery.worker import state as worker_state

from tests.simulation import apps, beats, beyond, faults, inside, loading, locks, nodes, senders, servers, trouble
from tests.simulation.answers import Answers
from tests.simulation.clusters import Cluster
from tests.simulation.invariants import Invariants
from tests.simulation.newest import Newest
from tests.simulation.plan import Plan, draw
from tests.simulation.putbacks import PutBacks, given_to_messages
from tests.simulation.queued import Queued
from tests.simulation.refusals import Refusals
from tests.simulation.replacing import Replacing
from tests.simulation.reserved import Reserved
from tests.simulation.scheduler import Simulation, active, begin
from tests.simulation.worker import Worker
from tests.simulation.world import NOTICES, World, must_be_kept

#: Seconds after the last fault within which everything must have ended.
CALM = 600.0

#: Number of processes for which copies of the package are made ahead.
PROCESSES = 16

#: Least share of a lease that is left when its body has been stopped: 2/15, less the time to notice that.
SPARE = 1 / 10

#: Seconds for which it goes on when nothing is left, for late events.
AFTERWARDS = 2.0

#: Simulations whose new garbage is collected at once: so few that it is still in the processor's cache. After many of
#: them, objects that have survived such a collection are looked at as well.
TOGETHER, MANY = 10, 200

_simulations = count(1)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a simulation."""

    plan: Plan
    failure: str | None
    trace: tuple[tuple[float, str, str, str], ...]
    seconds: float
    switches: int
    bodies: int
    #: How often each rule was judged, each fault struck, each excuse held, and each shape was there.
    counts: dict[str, Counter[str]]


def prepare(*, processes: int = PROCESSES, rounds: int = 3) -> None:
    """Prepare the interpreter, once; it can only simulate from then on.

    Args:
        processes: number of processes for which copies of the package are made ahead.
        rounds: simulations whose objects the garbage collector ignores from then on; for few simulations, that does not
            pay.
    """
    servers.patch_redis_py()
    apps.patch_celery()
    urandom = os.urandom
    os.urandom = lambda count: _random(urandom, count)  # type: ignore[assignment]
    # The garbage collector ignores objects that are made once, or by a first run.
    gc.disable()
    for package in loading.ready(processes):
        apps.app_of(package, {})
    for seed in range(rounds):
        simulate(draw(seed))
    gc.freeze()


def simulate(plan: Plan) -> Result:
    """Carry out a plan."""
    loading.give_back_all()
    for requests in (worker_state.active_requests, worker_state.reserved_requests, worker_state.requests):
        requests.clear()
    worker_state.revoked.clear()
    run = Simulation(plan.seed, interval=plan.interval)
    begin(run)
    settings = {"singleton_lock_ttl": plan.ttl, "singleton_lock_journal": 0}
    world = World(run, settings, nodes=plan.nodes, visibility=plan.visibility, latency=plan.latency)
    world.plan = plan
    world.broker.in_turns = plan.in_turns
    if plan.is_cluster:
        world.cluster = Cluster(world)
    if plan.beyond:
        beyond.take_away(world)
    begin_with = {"sent": _begin_sent, "follows": _begin_sent, "locks": locks.begin}
    begin_with |= {"nodes": nodes.begin, "beats": beats.begin}
    checker = begin_with.get(plan.kind, _begin_tasks)(world)
    for fault in plan.faults:
        run.at(fault.at, partial(faults.befall, world, fault))
    run.watch.append(checker.look)
    try:
        run.run(plan.calm_at + CALM)
        if run.failure is None:
            checker.look_at_the_end()
    except Exception as error:  # noqa: BLE001 - a checker that does not know the package's inside any more, for example
        run.broke("the checker", error)
    counts = {"rules": run.judged, "faults": run.struck, "excuses": run.excused, "shapes": Counter([plan.shape])}
    bodies = sum(world.bodies.begun.values())
    result = Result(plan, run.failure, tuple(run.trace), run.now, run.switches, bodies, counts)
    run.close()
    del run, world, checker
    if (number := next(_simulations)) % TOGETHER == 0:
        gc.collect(2 if number % MANY == 0 else 0)
    return result


def _begin_tasks(world: World) -> Checker:
    """Start workers, and a program that sends them messages; returns the checker."""
    _start_workers(world)
    client = world.process(world.host("web"), "web")
    world.run.start(client, partial(_send, world, client))
    return Checker(world)


def _begin_sent(world: World) -> Checker:
    """Start workers, and programs that send messages with their locks; returns the checker."""
    if world.plan.queue_ttl is not None:
        world.settings["singleton_lock_queue_ttl"] = world.plan.queue_ttl
    _start_workers(world)
    checker = Checker(world)
    checker.queued = Queued(world)
    checker.replacing = Replacing(world, checker.queued)
    senders.begin(world, checker.queued)
    return checker


def _start_workers(world: World) -> None:
    plan = world.plan
    for number in range(plan.workers):
        host = world.workers[0].host if plan.on_one_host and number else world.host(f"host{number}")
        worker = Worker(world, host, number, pool=plan.pool, concurrency=plan.concurrency)
        world.workers.append(worker)
        worker.start()


class Checker:
    """What must hold in a simulation of tasks."""

    def __init__(self, world: World) -> None:
        self.world, self.run = world, world.run
        self.answers = world.answers = Answers(world)
        self.newest = world.newest = Newest(world)
        self.invariants = Invariants(world)
        PutBacks(world)
        self.reserved = Reserved(world)
        self.refusals = Refusals(world)
        #: The checker of messages that have a lock while they wait, if there are any.
        self.queued: Queued | None = None
        #: And of those that take the place of others.
        self.replacing: Replacing | None = None
        #: Ids that the plan gives to several messages; the other checkers know a message by its id.
        self._shared = {message.sent.removeprefix("id=") for message in world.plan.messages if "id=" in message.sent}
        self._calm_at = world.plan.calm_at
        self._nothing_left_since: float | None = None
        # The last held-back requests arrive when it is calm, and their locks end after that, if nothing else happens.
        world.run.at(self._calm_at + AFTERWARDS + world.plan.ttl + 0.01, lambda: None)
        world.run.on_result = [self._stored]  # type: ignore[attr-defined]

    def _stored(self, task_id: str, state: str, result: Any) -> None:
        if task_id in self._shared:
            self.world.ends[task_id] += [state] * (state in states.READY_STATES)
        elif state in states.READY_STATES:
            ends = self.world.ends[task_id]
            if task_id in self.world.revoked and states.REVOKED in (state, *ends):
                # Celery ends a revoked message when a worker gets it, whatever happens to another copy.
                ends[:] = [end for end in ends if end != states.REVOKED] or [state]
            else:
                ends.append(state)
            is_large = any("large=1" in message.words for message in self.world.plan.messages)
            if not is_large:
                is_known = not isinstance(result, dict) or result.get("exc_type") != "ResultLost"
                self.run.must(is_known, "{} ends with ResultLost, and each value is short enough to be kept", task_id)
            plan = self.world.plan
            moves = all(fault.kind == "slot moves" and fault.seconds < NOTICES for fault in plan.faults)
            # To find where a slot has moved to takes several round trips, each in a renewal's step.
            if not plan.faults or (moves and 2 * plan.latency < plan.ttl * inside.STEP_SHARE):
                is_kept = not isinstance(result, dict) or result.get("exc_type") != "LockLost"
                self.run.must(is_kept, "{} loses its lock, although each lock server answers", task_id)
            self.world.bodies.note_end(task_id, state)
            self.answers.note_end(task_id, state, result)
            self.newest.note_end(task_id, state, result)
            self.world.parked.note_end(task_id)
            self.invariants.note_end(task_id, state)
            self.refusals.note_end(task_id, state, result)
            if self.queued is not None:
                self.queued.has_ended(task_id)
            if self.replacing is not None:
                self.replacing.note_end(task_id, state, result)

    def look(self) -> None:
        """Check, whenever time is about to advance."""
        world, run = self.world, self.run
        for body in world.bodies.each():
            if body.process.alive:
                must_be_kept(world, body.process, body.lease, f"{body.key}: message {body.number}")
            if body.process.is_well:
                self._is_told(body)
        self.invariants.look()
        world.parked.look()
        self.answers.look()
        self.newest.look()
        self.reserved.look()
        if self.queued is not None:
            self.queued.look()
        left = run.now < self._calm_at or not world.broker.is_empty() or any(world.bodies.running.values())
        if left:
            self._nothing_left_since = None
        elif self._nothing_left_since is None:
            self._nothing_left_since = run.now
            run.after(AFTERWARDS + world.plan.ttl + 0.01, lambda: None)
        elif run.now > self._nothing_left_since + AFTERWARDS + world.plan.ttl and not self._awaits_an_end:
            run.is_finished = True

    @property
    def _awaits_an_end(self) -> bool:
        """Whether there is a lock of a message that expires soon."""
        return self.queued is not None and self.queued.awaits_an_end()

    def _is_told(self, body: Any) -> None:
        """Check that a body whose lease is nearly over has been stopped, unless its process was frozen."""
        process, lease = body.process, body.lease
        left = lease.trusted_until - process.host.clock(self.run.now)
        if self.run.now > process.frozen_until + NOTICES + lease.ttl / 3:
            is_early, what = left >= SPARE * lease.ttl, (body.key, body.number, left)
            self.run.must(is_early, "{}: message {} runs on, {:.3f} s before the end of its lease", *what)

    def look_at_the_end(self) -> None:
        """Check, when everything should be over."""
        world, run, must = self.world, self.run, self.run.must
        bodies = [body.number for body in world.bodies.each()]
        is_over = run.is_finished or (world.broker.is_empty() and not bodies)
        must(is_over, "stuck: queues {}, bodies {}", len(world.broker.queue), bodies)
        if not is_over:
            return
        for server in (server for server in world.servers if server.living()):
            must((stays := server.without_end()) is None, "{} on {} has no time to live", stays, server.host.name)
            must((held := server.held()) is None, "{} on {} is held by nobody", held, server.host.name)
        for number, (task_id, message) in world.sent.items():
            if task_id in self._shared and number not in world.bodies.run_again:
                times = world.bodies.succeeded[number]
                must(times == 1, "message {} has the id of another one, and is carried out {} times", number, times)
            ends, follows = world.ends.get(task_id, []), f"{task_id}-after"
            if not self._may_be_lost(message):
                must(ends, "message {} ({}) is lost: it has no end", number, message.task)
            # Nobody knows of the end of a body whose process was gone by then: a copy may be superseded.
            is_unknown = any(of == number for of, _ in world.bodies.unknown) or number in world.bodies.ended_elsewhere
            if states.SUCCESS in ends and not is_unknown:
                must(ends[-1] == states.SUCCESS, "message {} ends as {}", number, ends)
            if message.chained and ends[-1:] == [states.SUCCESS] and not self._has_lost(follows):
                is_sent = world.bodies.followed[follows] or states.REVOKED in world.ends.get(follows, ())
                must(is_sent, "message {} has ended well, and what follows on it was not sent", number)
        self.invariants.look_at_the_end()
        self.newest.look_at_the_end()
        if self.queued is not None:
            self.queued.look_at_the_end()
        if self.replacing is not None:
            self.replacing.look_at_the_end()

    @trouble.excuse
    def _may_be_lost(self, message: Any) -> bool:
        """Whether Celery may lose it with its process, since it is acknowledged early, or the broker has lost it."""
        if self._has_lost(f"m{message.number}"):
            return True
        late = apps.TASKS[message.task].get("acks_late")
        return not late and any("killed" in fault.kind for fault in self.world.plan.faults)

    @trouble.excuse
    def _has_lost(self, task_id: str) -> bool:
        """Whether the broker has lost this message."""
        return self.queued is not None and task_id in self.queued.lost


def _send(world: World, client: Any) -> None:
    client.package.begin()
    app = apps.app_of(client.package, world.settings)
    run, given = world.run, given_to_messages(world.plan)
    for message in sorted(world.plan.messages, key=lambda message: message.at):
        run.park(max(message.at - run.now, 0.0) / client.host.rate)
        task_id = message.sent.removeprefix("id=") or f"m{message.number}"
        world.sent[message.number] = (task_id, message)
        signature = app.tasks[message.task].si(message.key, message.number, message.words)
        signature.set(task_id=task_id, **given)
        if message.chained:
            signature.link(app.tasks["shop.after"].s(message.number).set(task_id=f"{task_id}-after"))
        world.asked_at[message.number] = run.now
        signature.apply_async()


def _random(plain: Callable[[int], bytes], count: int) -> bytes:
    run = active()
    return plain(count) if run is None or run.over else run.rng.randbytes(count)
