"""Beats with the exclusive scheduler, a worker for their messages, and what must hold for both.

The loop of a beat is that of `celery.beat.Service`; the schedule is in the settings, and the scheduler wraps Celery's.
"""

from __future__ import annotations

import math
import signal
from collections import defaultdict
from contextlib import suppress
from datetime import datetime
from itertools import pairwise
from typing import Any

from tests.simulation import apps, fakes, holds, inside, trouble
from tests.simulation.program import Program
from tests.simulation.scheduler import Process
from tests.simulation.worker import Worker
from tests.simulation.world import World

#: Seconds beyond its calm after which all goes well: a step may take a second, and after an outage beat tries again a
#: second later.
RECOVERS = 4.0

#: Seconds by which a tick may be late while nothing goes wrong.
LATE = 0.5

#: Most seconds by which the clock of a beat is wrong.
AHEAD = 0.2

#: Seconds for which all must go well at the end.
CALM = 10.0

#: Least seconds that a look at the schedule takes.
TICK = 0.001

#: Faults that strike only one beat, so that others go on.
_OF_ONE = frozenset({"worker killed", "worker stopped", "host suspended", "beat ended"})

#: Faults during which a beat can still shut down properly.
_ENDS = (*trouble.BRIEF, "beat ended", "broker refuses")


def begin(world: World) -> BeatsChecker:
    """Start the beats and a worker; returns the checker."""
    plan = world.plan
    world.settings |= {
        "singleton_lock_beat_scheduler": "celery.beat:Scheduler",
        "singleton_lock_beat_ttl": plan.ttl,
        "beat_schedule": {
            name: {"task": "shop.tick", "schedule": seconds, "args": (name,)} for name, seconds in plan.entries
        },
    }
    checker = BeatsChecker(world)
    for number in range(plan.workers):
        host = world.host(f"host{number}")
        host.wall *= AHEAD / 2
        beat = Program(world, host, f"beat{number}", checker.live)
        world.workers.append(beat)
        beat.start()
    # No fault strikes this worker.
    Worker(world, world.host("works"), 0, pool=plan.pool, concurrency=plan.concurrency).start()
    return checker


class BeatsChecker:
    """What the beats do, and what must hold for them."""

    def __init__(self, world: World) -> None:
        self.world, self.run, self.plan = world, world.run, world.plan
        self._intervals = dict(world.plan.entries)
        self._schedulers: dict[Any, Any] = {}
        #: The tick of each id; the id of each tick; by entry, the sent ticks and their times.
        self._ticks: dict[str, tuple[str, str]] = {}
        self._ids: dict[tuple[str, str], str] = {}
        self._sent_at: dict[tuple[str, str], tuple[float, Process]] = {}
        self._sent: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
        self._not_taken: set[tuple[str, str]] = set()
        # A new node of a Redlock has no vote for one ttl.
        self._calm_from = max(world.plan.calm_at, world.plan.ttl if world.plan.nodes > 1 else 0.0)
        world.broker.on_put.append(self._is_sent)

    def live(self, beat: Program) -> None:
        """The life of a beat's process."""
        process = beat.process
        app = apps.app_of(process.package, self.world.settings)
        scheduler = inside.scheduler_of(process.package, app)
        self._schedulers[process] = scheduler
        process.handlers[signal.SIGTERM] = self._end_in_order(scheduler)
        try:
            self._tick_until_ended(scheduler)
            scheduler.close()
            self.run.note("has ended in order")
            self._must_be_seen_no_more(process)
        except SystemExit:
            self.run.note("does not end in order", "a second signal came meanwhile")
        self.run.kill(process)

    def _tick_until_ended(self, scheduler: Any) -> None:
        with suppress(SystemExit):
            while True:
                seconds = scheduler.tick()
                # Celery polls in the last 10 ms before a tick is due, which takes time.
                fakes.sleep(seconds if seconds and seconds > 0.0 else TICK)

    def _end_in_order(self, scheduler: Any) -> Any:
        def end(*_: Any) -> None:
            scheduler.close()
            raise SystemExit

        return end

    # What must hold

    def _is_sent(self, message: dict[str, Any], is_taken: bool) -> None:
        headers = message["headers"]
        ours, must = inside.header_of(headers), self.run.must
        if (due := ours.due) is None or headers.get("retries"):
            return
        task = self.run.current
        if task is None or task.process not in self._schedulers:
            return  # A worker puts it back.
        entry, task_id = str(ours.entry), headers["id"]
        for server in self.world.servers:
            inside.check_keys(key for key, _ in server.living_values())  # Claims end soon.
        tick = entry, due
        if not is_taken:
            self._not_taken.add(tick)
            self.run.note("cannot send a tick", f"{entry} due {due[14:26]}")
            return
        self._makes_up_for(entry, due)
        self._may_be_killed(task.process)
        self.run.note("sends a tick", f"{entry} due {due[14:26]}")
        is_repeated = tick in self._ids
        is_forgotten = bool(self._sent[entry]) and self._is_forgotten(self._sent[entry][-1][0])
        before = self._ids.setdefault(tick, task_id)
        if not is_forgotten:
            what = entry, due, task_id, before
            must(before == task_id, "{}: its tick of {} is sent as {}, and was as {}", *what)
        other = self._ticks.setdefault(task_id, tick)
        must(other == tick, "{}: {} is its tick of {}, and of {}", entry, task_id, due, other)
        self._is_sent_once(tick, task.process)
        wall = task.process.host.wall_clock(self.run.now)
        if is_repeated and self._sent[entry] and self._sent[entry][-1][1] == _seconds(due):
            self._sent[entry][-1] = (*self._sent[entry][-1][:2], wall)
        elif entry in self._intervals and not is_repeated:
            self._sent[entry].append((self.run.now, _seconds(due), wall))
            self._follows_on_the_last(entry)

    def _is_sent_once(self, tick: tuple[str, str], sender: Process) -> None:
        """Check that a tick is sent again only when, after a fault, the claim may be over under which it was sent: with
        its ttl, or because its process has ended.
        """
        sent_at, before = self._sent_at.get(tick, (-math.inf, sender))
        after = self.run.now - sent_at
        self._sent_at[tick] = self.run.now, sender
        if before.alive and not self._may_lose_its_claim():
            is_over = after >= (self.plan.ttl / 2 if self.plan.faults else math.inf)
            self.run.must(is_over, "{}: its tick of {} is sent again after {:.3f} s", *tick, after)

    @trouble.excuse
    def _may_lose_its_claim(self) -> object:
        """Whether a beat may have sent a tick late, or a server may have forgotten who had claimed it."""
        kinds = {fault.kind for fault in self.plan.faults if fault.at <= self.run.now}
        return not kinds.isdisjoint((*trouble.OF_WORKERS, "server restarted empty"))

    def _makes_up_for(self, entry: str, due: str) -> None:
        """Note that a refused tick is sent, or one close to it: nodes may disagree about the last run."""
        within, at = self._intervals[entry] - 0.001, _seconds(due)
        self._not_taken -= {it for it in self._not_taken if it[0] == entry and abs(_seconds(it[1]) - at) < within}

    def _may_be_killed(self, process: Process) -> None:
        """Perhaps kill a beat between the send of a tick and its record."""
        if self.world.doomed_beats:
            seconds = self.world.doomed_beats.pop(0)
            self.run.strikes("beat killed as it sends")
            beat = next(beat for beat in self.world.workers if beat.process is process)
            self.run.after(self.run.rng.uniform(0.0, 0.002), lambda: self.run.kill(process))
            self.run.after(seconds + 0.01, beat.start)

    def _follows_on_the_last(self, entry: str) -> None:
        """Check that each tick is due an interval after the previous one; after a gap, an interval after its send."""
        interval, ticks = self._intervals[entry], self._sent[entry][-2:]
        (sent_at, last, wall), (_, due, _) = ticks[0], ticks[-1]
        if self._is_forgotten(sent_at) or len(ticks) < 2:
            return
        is_next = abs(due - last - interval) < 0.001 or (due > last and wall - last > interval - 2 * AHEAD - LATE)
        what = entry, due - last, interval
        self.run.must(is_next, "{}: a tick is due {:.6f} s after the one before, every {:g} s", *what)

    @trouble.excuse
    def _is_forgotten(self, sent_at: float) -> bool:
        """Whether a node may have lost what was known then (the last run), and others have missed it or are
        away.
        """
        is_lost = any(fault.kind == "server restarted empty" and fault.at >= sent_at for fault in self.plan.faults)
        return is_lost and len(self.plan.faults) > 1

    def _must_be_seen_no_more(self, process: Any) -> None:
        """Check that it is not shown as a beat that runs."""
        shown = [value for key, value in holds.on_most(self.world.servers).items() if inside.is_of_beat(key)]
        if not trouble.is_there(self.world, but=_ENDS):
            is_gone = all(inside.hold_of(it).pid != process.pid for it in shown)
            self.run.must(is_gone, "{} has ended in order, and is shown as a beat that runs", process.name)

    def look(self) -> None:
        """Check, whenever time is about to advance."""
        if self.run.now > self._well_from() + CALM:
            self.run.is_finished = True

    def _well_from(self) -> float:
        """From when each tick must be sent in time: no dead beat has a claim."""
        # What was due meanwhile is sent as soon as a claim has ended, and may be followed at once by the next tick.
        return self._calm_from + self.plan.ttl + RECOVERS + LATE

    def _must_go_on(self) -> None:
        """Check that others send while one beat is dead: what it had claimed, when its claim has ended."""
        kinds = {fault.kind for fault in self.plan.faults}
        if self.plan.workers > 1 and len(self.plan.faults) == 1 and kinds <= _OF_ONE:
            for entry, interval in self._intervals.items():
                for (earlier, *_), (at, *_) in pairwise(self._sent[entry]):
                    is_soon = at - earlier <= interval + self.plan.ttl + RECOVERS
                    self.run.must(is_soon, "{}: nothing is sent for {:.3f} s", entry, at - earlier)

    def look_at_the_end(self) -> None:
        """Check, when everything has been well for a while."""
        since, must = self._well_from(), self.run.must
        self._must_go_on()
        for entry, interval in self._intervals.items():
            ticks = [at for at, _, _ in self._sent[entry] if at > since]
            # One tick may be just before, and the beat's clock may be slow.
            are_all = len(ticks) >= CALM // interval - 1
            must(are_all, "{}: {} ticks in the last {:g} s, every {:g} s", entry, len(ticks), CALM, interval)
            for earlier, at in pairwise(ticks):
                is_in_time = abs(at - earlier - interval) <= LATE + 0.01 * interval
                must(is_in_time, "{}: a tick is sent {:.3f} s after the one before", entry, at - earlier)
        must(not self._not_taken, "the broker did not take {}, and they were not sent again", self._not_taken)
        for task_id, tick in self._ticks.items():
            if not any(at > self.run.now - 2 for at, _, _ in self._sent[tick[0]][-3:]):
                must(self.world.bodies.succeeded[task_id], "{}: its tick of {} was sent, and did not run", *tick)
        for server in self.world.servers:
            stays = server.without_end()
            must(stays is None, "{} on {} has no time to live", stays, server.host.name)


def _seconds(due: str) -> float:
    return datetime.fromisoformat(due).timestamp()
