"""How each way to lock behaves when things go wrong: the same events for all of them, on real servers and processes.

    python -m benchmarks.race [--write benchmarks/results/schemes.md]

Every cell of the table shows what was observed, not what is known.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from benchmarks.measure import commands, server_version
from benchmarks.page import table, tell
from benchmarks.schemes import SCHEMES, Lock, Scheme
from tests.proxy import LossyProxy
from tests.redis_server import RedisServer

#: Seconds that a lock outlives its holder; seconds after the ttl when a lock that is still held counts as stuck; and
#: seconds by which a holder that works, or is stopped, outlasts the ttl.
TTL, MARGIN, LONGER = 1.0, 1.0, 0.4

NODES, PROCESSES, ROUNDS = 3, 4, 25

_fork = multiprocessing.get_context("fork")


@dataclass
class Course:
    """One scheme, on empty servers."""

    scheme: Scheme
    servers: Sequence[RedisServer]
    client: type[Redis] = Redis
    ports: Sequence[int] = ()
    ttl: float = TTL

    def make(self) -> Any:
        """Make another holder, as in another process."""
        ports = self.ports or [server.port for server in self.servers]
        # By its address: the child of a fork waits forever for a name if a thread of its parent was looking one up.
        return self.scheme([self.client(host="127.0.0.1", port=port) for port in ports], "race", self.ttl)

    def held(self) -> Any:
        """Make a holder that has the lock."""
        lock = self.make()
        assert lock.acquire()
        return lock

    def freed(self) -> str:
        """How long it takes until somebody else can take the lock."""
        began, other = time.monotonic(), self.make()
        while (passed := time.monotonic() - began) < TTL + MARGIN:
            if other.acquire():
                other.release()
                return f"free after {passed:.1f} s"
            time.sleep(0.01)
        return "stuck"


class _Dying(Redis):
    """A client whose process dies after that many commands, or that reports how many there were."""

    left = 0

    def execute_command(self, *args: Any, **options: Any) -> Any:
        answer = super().execute_command(*args, **options)
        _Dying.left -= 1
        if _Dying.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer


def _in_child(work: Callable[..., object], *arguments: object) -> Any:
    """Start a process that does it."""
    process = _fork.Process(target=work, args=arguments, daemon=True)
    process.start()
    return process


def race(course: Course) -> str:
    """Several processes count in a file, one at a time."""
    with tempfile.TemporaryDirectory() as folder:
        counter = Path(folder) / "counter"
        counter.write_text("0")

        def work() -> None:
            for _ in range(ROUNDS):
                lock = course.make()
                while not lock.acquire():
                    time.sleep(0.001)
                count = int(counter.read_text())
                time.sleep(0.0005)
                counter.write_text(str(count + 1))
                lock.release()

        workers = [_in_child(work) for _ in range(PROCESSES)]
        for worker in workers:
            worker.join(60)
            worker.kill()
        done = PROCESSES * ROUNDS
        return f"{done - int(counter.read_text())} of {done} updates lost"


def killed_holder(course: Course) -> str:
    """SIGKILL to the holder."""

    def work() -> None:
        course.held()
        os.kill(os.getpid(), signal.SIGKILL)

    _in_child(work).join()
    return course.freed()


def killed_within_acquire(course: Course) -> str:
    """SIGKILL between the commands of an acquire, after each of them but the last. `Lock` uses its own client."""
    dying, _Dying.left = replace(course, client=_Dying), 0
    lock = dying.held()
    count = -_Dying.left
    lock.release()

    def work(left: int) -> None:
        _Dying.left = left
        dying.held()

    worst = "–"
    for left in range(1, count if count > len(course.servers) else 0):
        _in_child(work, left).join()
        worst = course.freed()
    return worst


def long_work(course: Course) -> str:
    """The holder is healthy, and works for longer than the ttl."""
    lock = course.held()
    time.sleep(TTL + LONGER)
    found = "second holder in" if course.make().acquire() else "kept"
    lock.release()
    return found


def paused_holder(course: Course) -> Mapping[str, str]:
    """SIGSTOP past the ttl; somebody else takes the lock; SIGCONT, and the first one frees "its" lock."""
    ours, theirs = _fork.Pipe()

    def work() -> None:
        lock = course.held()
        theirs.send("holds")
        theirs.recv()
        theirs.send(_said(lock))

    child = _in_child(work)
    ours.recv()
    os.kill(child.pid, signal.SIGSTOP)
    time.sleep(TTL + LONGER)
    second = course.make()
    got = second.acquire()
    os.kill(child.pid, signal.SIGCONT)
    ours.send("release")
    told, released = ours.recv(), "leaves it alone"
    child.join()
    if not got:
        told, released = "nobody else gets in", "–"
    elif course.make().acquire():
        released = "deletes the other's"
    return {"holder stopped past the ttl": told, "its release then": released}


def _said(lock: Lock) -> str:
    try:
        answer = lock.release()
    except Exception as error:  # noqa: BLE001 - whatever the error is, the holder notices
        return f"noticed: {type(error).__name__}"
    return "noticed: False" if answer in (False, 0) else "never noticed"


def lost_reply(course: Course) -> str:
    """The reply to the acquire is lost, and the client sends the command again, as it does by default."""
    with ExitStack() as exits:
        proxies = [exits.enter_context(LossyProxy(server.port)) for server in course.servers]
        lock = replace(course, ports=[proxy.port for proxy in proxies]).held()
        lock.release()
        for proxy in proxies:
            proxy.lose(1)
        try:
            return "gets it" if lock.acquire() else "locked out by itself"
        except RedisError as error:
            return type(error).__name__


def fences(course: Course) -> str:
    """Whether each later holder has a higher number, after a flush as well."""
    numbers = []
    for flushed in ((), (), course.servers):
        for server in flushed:
            server.flush()
        lock = course.held()
        numbers.append(getattr(lock, "fence", None))
        lock.release()
    if None in numbers:
        return "none"
    return "grow, also after a flush" if numbers == sorted(set(numbers)) else "do not always grow"


def waiting(course: Course) -> str:
    """What one waiter costs: commands in two seconds, including those within scripts."""
    course = replace(course, ttl=30.0)
    lock = course.held()
    with course.servers[0].client() as client:
        before = commands(client)
        course.make().acquire(2.0)
        count = commands(client) - before - 1
    lock.release()
    return str(count)


#: The events by their names in the table; `paused_holder` fills two rows.
EVENTS: Mapping[str, Callable[[Course], Any]] = {
    "processes race": race,
    "holder killed": killed_holder,
    "killed within acquire": killed_within_acquire,
    "works longer than the ttl": long_work,
    "(stopped)": paused_holder,
    "reply to acquire lost": lost_reply,
    "fencing tokens": fences,
    "commands of one waiter in 2 s": waiting,
}


def judge(name: str, servers: Sequence[RedisServer]) -> dict[str, str]:
    """All events for one scheme."""
    print(name, file=sys.stderr)
    nodes, rows = servers if name.startswith("Redlock") else servers[:1], {}
    for row, event in EVENTS.items():
        for server in nodes:
            server.flush()
        found = event(Course(SCHEMES[name], nodes))
        rows |= found if isinstance(found, Mapping) else {row: found}
    return rows


def judge_all() -> str:
    """The whole table, with a column for each scheme, all on the same servers."""
    with ExitStack() as exits:
        servers = [exits.enter_context(RedisServer()) for _ in range(NODES)]
        found = {name: judge(name, servers) for name in SCHEMES}
    about = f"ttl {TTL:g} s, {PROCESSES} processes, Redis {server_version()}, Python {platform.python_version()}"
    return table(found, f"{about}; Redlock on {NODES} servers")


if __name__ == "__main__":
    tell(__doc__, judge_all)
