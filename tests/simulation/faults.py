"""The effect of each kind of fault on a world, and its end.

A function that returns False has struck nothing yet: it found nobody, or waits for an event, and then says so itself.
"""

from __future__ import annotations

import signal
from functools import partial
from typing import Any

from tests.simulation import senders, ways
from tests.simulation.network import Link
from tests.simulation.plan import HOLDS_BACK, Fault
from tests.simulation.worker import Child, Worker
from tests.simulation.world import look_at_the_last


def befall(world: Any, fault: Fault) -> None:
    """Let a fault happen now."""
    world.run.note("FAULT", f"{fault.kind} #{fault.target} for {fault.seconds:.3f} s", by="nemesis")
    if (BY_KIND | _BEYOND)[fault.kind](world, fault) is not False:
        world.run.strikes(fault.kind)


def _worker(world: Any, fault: Fault) -> Worker:
    worker: Worker = world.workers[fault.target % len(world.workers)]
    return worker


def _child(world: Any, fault: Fault) -> Child | None:
    children = _worker(world, fault).living
    busy = [child for child in children if child.job is not None] or children
    return busy[fault.target // 7 % len(busy)] if busy else None


def _server(world: Any, fault: Fault) -> Any:
    return world.nodes[fault.target % len(world.nodes)]


def _way(world: Any, fault: Fault) -> Link:
    """The link between a worker's host and a server, which is in trouble from now on."""
    link: Link = world.network.link(_worker(world, fault).host.name, _server(world, fault).host.name)
    link.troubled_until = max(link.troubled_until, world.run.now + max(fault.seconds, HOLDS_BACK))
    return link


def _child_killed(world: Any, fault: Fault) -> bool:
    child = _child(world, fault)
    if child is not None:
        world.run.kill(child.process)
    return child is not None


def _killed_at_an_end(world: Any, fault: Fault) -> bool:
    world.bodies.doomed += 1
    return False


def _ended(world: Any, fault: Fault) -> bool:
    """Shut it down with SIGTERM."""
    worker = _worker(world, fault)
    if not worker.is_alive:
        return False
    # It may take its time to end: starting it earlier would be of no use.
    worker.process.at_end.append(lambda: world.run.after(fault.seconds, worker.start))
    world.run.signal(worker.process, signal.SIGTERM)
    return True


def _freeze(world: Any, of: Child | Worker | None, seconds: float) -> bool:
    if of is None or (process := of.process) is None or not process.alive:
        return False
    world.run.stop(process)
    _look_at_the_last(world)

    def go_on() -> None:
        process.frozen_until = world.run.now
        world.run.go_on(process)

    world.run.after(seconds, go_on)
    return True


def _look_at_the_last(world: Any) -> None:
    for process, lease in world.leases():
        if not process.runs:
            look_at_the_last(world, process, lease)


def _host_suspended(world: Any, fault: Fault) -> bool:
    host = _worker(world, fault).host
    if host.suspended:
        return False
    world.run.suspend(host)
    _look_at_the_last(world)

    def resume() -> None:
        for process in world.run.processes:
            if process.host is host:
                process.frozen_until = world.run.now
        world.run.resume(host)

    world.run.after(fault.seconds, resume)
    return True


def _wall_clock_set(world: Any, fault: Fault) -> None:
    _worker(world, fault).host.wall += (fault.target - 50) * 1.0


def _server_stalled(world: Any, fault: Fault) -> bool:
    server = _server(world, fault)
    server.stall()
    world.run.after(fault.seconds, server.go_on)
    return server.model is not None


def _restarted(world: Any, fault: Fault, *, having: str) -> bool:
    server = _server(world, fault)
    is_there = server.model is not None
    server.crash()
    world.run.after(fault.seconds, lambda: server.restart(having))
    return is_there


def _restarted_behind(world: Any, fault: Fault) -> None:
    _server(world, fault).host.wall -= 3600.0
    _restarted(world, fault, having="nothing")


def _wakes_nobody(world: Any, fault: Fault) -> bool:
    server = _server(world, fault)
    server.wakes_nobody_until = max(server.wakes_nobody_until, world.run.now + fault.seconds)
    return False


def _cut(world: Any, fault: Fault, *, there: bool = False, back: bool = False) -> None:
    link = _way(world, fault)
    link.cut_there, link.cut_back = there, back
    world.run.after(fault.seconds, link.open)


def _cut_at_an_end(world: Any, fault: Fault, *, there: bool = False, back: bool = False) -> bool:
    """Cut the link between a host and a server when the next body on that host ends."""

    def cut(host: Any) -> Any:
        world.run.strikes(fault.kind)
        link = world.network.link(host.name, _server(world, fault).host.name)
        link.troubled_until = max(link.troubled_until, world.run.now + fault.seconds)
        link.cut_there, link.cut_back = there, back
        world.ways_cut_at.append((world.run.now, fault.seconds))
        world.run.note("is cut", f"there {there}, back {back}", by=host.name)
        return link.open

    world.bodies.befalls.append((cut, fault.seconds))
    return False


def _child_ended(world: Any, fault: Fault) -> bool:
    """End a child by SIGTERM, which interrupts its work."""
    child = _child(world, fault)
    if child is None or child.process.main is None:
        return False
    world.run.throw(child.process.main, SystemExit)
    world.run.wake(child.process.main)
    return True


def _results_slow(world: Any, fault: Fault) -> None:
    world.results_slow_until = world.run.now + fault.seconds


def _beat_killed_as_it_sends(world: Any, fault: Fault) -> bool:
    world.doomed_beats.append(fault.seconds)
    return False


def _held_back(world: Any, fault: Fault) -> bool:
    link = _way(world, fault)
    link.holds_back.extend([fault.seconds] * (1 + fault.target // 10 % 4))
    link.on_held_back = lambda _: world.run.strikes(fault.kind)
    world.run.after(HOLDS_BACK, link.holds_back.clear)
    return False


def _slow(world: Any, fault: Fault) -> None:
    link = _way(world, fault)
    link.delay = (0.0, 2.0 if fault.target % 2 else 0.3)

    def fast() -> None:
        link.delay = link.usual  # Another fault may end before this one.

    world.run.after(fault.seconds, fast)


def _at_a_distance(world: Any, fault: Fault, *, share: float) -> None:
    """Let each message between a host and a server take up to this share of the plan's latency."""
    link = world.network.link(_worker(world, fault).host.name, _server(world, fault).host.name)
    link.usual = link.delay = (0.0001, share * world.plan.latency)


def _delivered_again(world: Any, fault: Fault) -> bool:
    held = [delivery for consumer in world.broker.consumers for delivery in consumer.unacked.values()]
    if held:
        world.broker.deliver_again(held[fault.target % len(held)])
    return bool(held)


def _acknowledgement_lost(world: Any, fault: Fault) -> bool:
    world.broker.lose_acks += 1
    return False


def _broker_cut(world: Any, fault: Fault) -> bool:
    consumers = world.broker.consumers
    if consumers:
        consumers[fault.target % len(consumers)].cut(fault.seconds)
    return bool(consumers)


def _broker_deaf(world: Any, fault: Fault) -> None:
    world.broker.deaf_until = max(world.broker.deaf_until, world.run.now + fault.seconds)


def _broker_is(world: Any, fault: Fault, *, name: str) -> None:
    setattr(world.broker, name, True)
    world.run.after(fault.seconds, lambda: setattr(world.broker, name, False))


def _pids_come_again(world: Any, _: Fault) -> None:
    world.pids_come_again = True


BY_KIND: dict[str, Any] = {
    "child killed": _child_killed,
    "child killed at an end": _killed_at_an_end,
    "worker killed": lambda world, fault: _worker(world, fault).kill_for(fault.seconds),
    "worker ended": _ended,
    "child stopped": lambda world, fault: _freeze(world, _child(world, fault), fault.seconds),
    "worker stopped": lambda world, fault: _freeze(world, _worker(world, fault), fault.seconds),
    "host suspended": _host_suspended,
    "wall clock set": _wall_clock_set,
    "server stalled": _server_stalled,
    "server restarted": partial(_restarted, having="all"),
    "server restarted empty": partial(_restarted, having="nothing"),
    "server flushed": lambda world, fault: _server(world, fault).flush(),
    "server forgets its scripts": lambda world, fault: _server(world, fault).forget_scripts(),
    "wake-ups lost": _wakes_nobody,
    "woken in vain": lambda world, fault: _server(world, fault).wake_all(),
    "connections closed": lambda world, fault: _server(world, fault).close_connections(),
    "cut there": partial(_cut, there=True),
    "cut back": partial(_cut, back=True),
    "cut": partial(_cut, there=True, back=True),
    "slow": _slow,
    "near": partial(_at_a_distance, share=0.1),
    "far": partial(_at_a_distance, share=1.0),
    "cut at an end": partial(_cut_at_an_end, there=True, back=True),
    "cut there at an end": partial(_cut_at_an_end, there=True),
    "cut back at an end": partial(_cut_at_an_end, back=True),
    "child killed by SIGTERM": _child_ended,
    "results slow": _results_slow,
    "beat killed as it sends": _beat_killed_as_it_sends,
    "requests held back": _held_back,
    "delivered again": _delivered_again,
    "acknowledgement lost": _acknowledgement_lost,
    "broker cut": _broker_cut,
    "broker deaf": _broker_deaf,
    "out of order": partial(_broker_is, name="shuffle"),
    "beat ended": _ended,
    "broker refuses": partial(_broker_is, name="refuses"),
    "pids come again": _pids_come_again,
    "slot moves": lambda world, fault: world.cluster.move(fault.target, fault.seconds),
}
BY_KIND |= ways.BY_KIND | senders.BY_KIND

#: What the guarantees do not allow: only plans of `beyond` have it.
_BEYOND: dict[str, Any] = {
    "server restarted with older data": partial(_restarted, having="saved"),
    "server restarted empty and behind": _restarted_behind,
    "key evicted": lambda world, fault: _server(world, fault).evict(),
}
