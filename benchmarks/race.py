"""What each way to lock does when things go wrong: the same events for all of them, on real servers and processes.

    python -m benchmarks.race [--write docs/locks.md]

Every cell of the table is what was seen, not what is known.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from benchmarks.measure import server_version
from benchmarks.schemes import Scheme, all_schemes
from celery_singleton_lock.testing import RedisServer
from tests.proxy import LossyProxy

#: Seconds that a lock outlives its holder.
TTL = 1.0

#: Seconds after the ttl at which a lock that is still held is stuck.
MARGIN = 1.0

NODES, PROCESSES, ROUNDS = 3, 4, 25

BEGIN, END = "<!-- race -->", "<!-- /race -->"

_fork = multiprocessing.get_context("fork")


@dataclass
class Course:
    """One scheme, on servers that are empty."""

    kind: type[Scheme]
    servers: Sequence[RedisServer]
    client: type[Redis] = Redis
    ports: Sequence[int] = field(default_factory=list)
    ttl: float = TTL

    def make(self) -> Any:
        """Another holder, as in another process."""
        ports = self.ports or [server.port for server in self.servers]
        return self.kind([self.client(port=port) for port in ports], "race", self.ttl)

    def other(self, kind: type[Redis]) -> Course:
        """The same with another kind of client."""
        return Course(self.kind, self.servers, kind, self.ports)

    def seconds_until_free(self) -> float | None:
        """How long until somebody else can take it; None if that takes longer than the ttl and the margin."""
        began, other = time.monotonic(), self.make()
        while (passed := time.monotonic() - began) < TTL + MARGIN:
            if other.acquire():
                other.release()
                return passed
            time.sleep(0.01)
        return None


class _Dying(Redis):
    """Its process dies after so many commands, or says how many there were."""

    left = 0

    def execute_command(self, *args: Any, **options: Any) -> Any:
        answer = super().execute_command(*args, **options)
        _Dying.left -= 1
        if _Dying.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer


def run_in_child(work: Callable[[], object]) -> Any:
    """A process that does it; started."""
    process = _fork.Process(target=work, daemon=True)
    process.start()
    return process


def race(course: Course) -> str:
    """Processes count in a file, one at a time."""
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

        workers = [run_in_child(work) for _ in range(PROCESSES)]
        for worker in workers:
            worker.join(60)
            worker.kill()
        done = PROCESSES * ROUNDS
        return f"{done - int(counter.read_text())} of {done} updates lost"


def killed_holder(course: Course) -> str:
    """SIGKILL while it holds."""

    def work() -> None:
        course.make().acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    run_in_child(work).join()
    return _freed(course)


def killed_within_acquire(course: Course) -> str:
    """SIGKILL between the commands of an acquire, after each of them but the last."""
    counting = course.other(_Dying).make()
    _Dying.left = 0
    counting.acquire()
    commands = -_Dying.left
    counting.release()
    if isinstance(counting, all_schemes()["ours"]) or commands < 2 or len(course.servers) == commands:
        return "–"
    worst = "–"
    for count in range(1, commands):

        def work(count: int = count) -> None:
            lock = course.other(_Dying).make()
            _Dying.left = count
            lock.acquire()

        run_in_child(work).join()
        worst = _freed(course)
    return worst


def _freed(course: Course) -> str:
    seconds = course.seconds_until_free()
    return "stuck" if seconds is None else f"free after {seconds:.1f} s"


def long_work(course: Course) -> str:
    """The holder is well, and works for longer than the ttl."""
    lock = course.make()
    lock.acquire()
    time.sleep(TTL + 0.4)
    second = course.make().acquire()
    return "second holder in" if second else "kept"


def paused_holder(course: Course) -> Mapping[str, str]:
    """SIGSTOP past the ttl; somebody else takes the lock; SIGCONT, and the first one frees "its" lock."""
    told, released = "holder stopped past the ttl", "its release then"
    ours, theirs = _fork.Pipe()

    def work() -> None:
        lock = course.make()
        lock.acquire()
        theirs.send("holds")
        theirs.recv()
        theirs.send(_said(lock))

    child = run_in_child(work)
    ours.recv()
    os.kill(child.pid, signal.SIGSTOP)
    time.sleep(TTL + 0.4)
    second = course.make()
    got = second.acquire()
    os.kill(child.pid, signal.SIGCONT)
    ours.send("release")
    said = ours.recv()
    child.join()
    if not got:
        return {told: "nobody else gets in", released: "–"}
    third = course.make().acquire()
    return {told: said, released: "deletes the other's" if third else "leaves it alone"}


def _said(lock: Any) -> str:
    try:
        answer = lock.release()
    except Exception as error:  # noqa: BLE001 - whatever it is, it was told
        return f"told: {type(error).__name__}"
    return "told: False" if answer in (False, 0) else "never told"


def lost_reply(course: Course) -> str:
    """The reply to the acquire is lost, and the client's default is to send it again."""
    proxies = [LossyProxy(server.port) for server in course.servers]
    behind = Course(course.kind, course.servers, ports=[proxy.port for proxy in proxies])
    lock = behind.make()
    lock.acquire()
    lock.release()
    for proxy in proxies:
        proxy.lose(1)
    try:
        got = lock.acquire()
    except RedisError as error:
        got = False
        return f"{type(error).__name__}"
    finally:
        for proxy in proxies:
            proxy.__exit__()
    return "gets it" if got else "locked out by itself"


def fences(course: Course) -> str:
    """Whether each later holder has a higher number, after a flush as well."""
    numbers = []
    for flush in (False, False, True):
        if flush:
            for server in course.servers:
                server.flush()
        lock = course.make()
        lock.acquire()
        numbers.append(getattr(lock, "fence", None))
        lock.release()
    if None in numbers:
        return "none"
    return "grow, also after a flush" if numbers == sorted(set(numbers)) else "do not always grow"


def waiting(course: Course) -> str:
    """What one waiter costs: commands in two seconds, those within scripts included."""
    course = Course(course.kind, course.servers, ttl=30.0)
    lock = course.make()
    lock.acquire()
    keeper = Redis(port=course.servers[0].port)
    before = keeper.info("stats")["total_commands_processed"]
    other, until = course.make(), time.monotonic() + 2.0
    if hasattr(other, "wait"):
        other.wait(2.0)
    else:
        while time.monotonic() < until and not other.acquire():
            time.sleep(0.1)
    return f"{keeper.info('stats')['total_commands_processed'] - before - 1}"


def judge(name: str, kind: type[Scheme], servers: Sequence[RedisServer]) -> dict[str, str]:
    """All events for one scheme."""
    nodes = servers if name.startswith("Redlock") else servers[:1]

    def on_empty_servers(event: Callable[[Course], Any]) -> Any:
        for server in nodes:
            server.flush()
        return event(Course(kind, nodes))

    return {
        "processes race": on_empty_servers(race),
        "holder killed": on_empty_servers(killed_holder),
        "killed within acquire": on_empty_servers(killed_within_acquire),
        "works longer than the ttl": on_empty_servers(long_work),
        **on_empty_servers(paused_holder),
        "reply to acquire lost": on_empty_servers(lost_reply),
        "fencing tokens": on_empty_servers(fences),
        "commands of one waiter in 2 s": on_empty_servers(waiting),
    }


def table(found: Mapping[str, Mapping[str, str]]) -> str:
    """In Markdown: a row for each event, a column for each scheme."""
    events = [*next(iter(found.values()))]
    lines = [f"| | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    lines += [f"| {event} | {' | '.join(cells[event] for cells in found.values())} |" for event in events]
    about = f"ttl {TTL:g} s, {PROCESSES} processes, Redis {server_version()}, Python {platform.python_version()}"
    return "\n".join([*lines, "", f"({about}; Redlock on {NODES} servers.)"])


def main() -> None:
    """Judge each scheme on the same servers."""
    tell(__doc__, judge_all)


def judge_all() -> str:
    """The table, a row for each scheme."""
    servers = [RedisServer() for _ in range(NODES)]
    found = {}
    for name, kind in all_schemes().items():
        print(name, file=sys.stderr)
        found[name] = judge(name, kind, servers)
    return table(found)


def tell(about: str | None, made: Callable[[], str]) -> None:
    """Print a table and, if the command line says so, put it between the marks in a page."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table between the marks in this file")
    page = parser.parse_args().write
    shown = made()
    print(shown)
    if page:
        before, _, rest = page.read_text().partition(BEGIN)
        page.write_text(f"{before}{BEGIN}\n{shown}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
