"""The cost of two beats: real processes with an empty schedule."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.beat_app import BROKER, LOCKS, LOOP
from benchmarks.measure import OWN, Row, Table, wait_until
from benchmarks.processes import celery, cpu_of
from tests.redis_server import RedisServer

#: Seconds for a beat to start, and between two looks at which connections it has.
LIMIT, LOOK_EVERY = 30.0, 0.25

#: Seconds of RedBeat's loop in the second pair: by default 300.
SHORT_LOOP = 5.0

#: The text that ends the recording of commands; and the name for commands that a script has called.
END, IN_SCRIPT = "end of the recording", "within a script"


class Pair(NamedTuple):
    """Two beats with one scheduler: what they log once they run or wait, and how soon a dead beat is replaced."""

    scheduler: str
    first: str
    second: str
    gap: str
    environment: Mapping[str, str]


_REDBEAT = Pair("redbeat:RedBeatScheduler", "beat: Acquired lock", "beat: Acquiring lock", "up to 1,500 + 300 s", {})

PAIRS: Mapping[str, Pair] = {
    OWN: Pair("exclusive", "beat: Starting", "beat: Starting", "at once: both send", {}),
    "RedBeat": _REDBEAT,
    f"RedBeat, beat_max_loop_interval {SHORT_LOOP:g}": _REDBEAT._replace(
        gap=f"up to {5 * SHORT_LOOP:g} + {SHORT_LOOP:g} s", environment={LOOP: str(SHORT_LOOP)}
    ),
}


def table(seconds: float) -> Table:
    """Measure all pairs at the same time, each in its own database."""
    with ExitStack() as exits:
        broker, locks = (exits.enter_context(RedisServer()) for _ in range(2))
        directory = Path(exits.enter_context(tempfile.TemporaryDirectory()))
        beats: list[_Beat] = []
        for database, (name, pair) in enumerate(PAIRS.items()):
            urls = {BROKER: broker.url_of(database), LOCKS: locks.url_of(database)}
            beats += _start(exits, name, pair, urls, directory)
        time.sleep(1.0)
        _observe(locks, beats, seconds)
    rows = [Row(beat.name, None, beat.columns(seconds)) for beat in beats]
    return Table("Standing by: two beats with an empty schedule", "", rows)


def notes(seconds: float) -> Sequence[str]:
    """What a reader of the table must know."""
    return [
        f"Standing by: `celery beat` processes, all pairs over the same {seconds:g} s. The commands are those that each"
        " process sends to the lock server, by MONITOR; a BLPOP that was already open does not count. The share of a"
        f" core is measured in steps of {0.01 / seconds:.2%}.",
        "The time until a dead beat is replaced follows from the settings, and was not measured. RedBeat's lock lasts"
        " five of its loops, and a beat on standby looks once per loop.",
    ]


@dataclass(slots=True)
class _Beat:
    """A running beat: its connections to the lock server, the CPU time that it had used at the first and the last look,
    and the commands that the server has carried out for it.
    """

    name: str
    pid: int
    gap: str
    ports: set[int] = field(default_factory=set)
    used: list[float] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)

    def look(self, server: RedisServer) -> None:
        """Note its connections, and its CPU time so far."""
        found = psutil.Process(self.pid).net_connections("tcp")
        self.ports |= {one.laddr.port for one in found if one.raddr and one.raddr.port == server.port}
        self.used = [*self.used[:1], cpu_of(self.pid)]

    def columns(self, seconds: float) -> dict[str, str]:
        """What it did, as columns of the table."""
        within = self.sent.pop(IN_SCRIPT, 0)
        return {
            "commands/s": f"{self.sent.total() / seconds:.2f}",
            "within their scripts": f"{within / seconds:.2f}",
            "which": ", ".join(f"{count} {name}" for name, count in self.sent.most_common()),
            "share of a core": f"{(self.used[-1] - self.used[0]) / seconds:.2%}",
            "a dead one is replaced after": self.gap,
        }


def _observe(server: RedisServer, beats: Sequence[_Beat], seconds: float) -> None:
    """Count what the server does for the beats in that many seconds."""
    with server.client() as client, server.client() as other:
        client.ping()  # So it is connected before the recording, which leaves that out.
        with other.monitor() as monitor:
            deadline = time.monotonic() + seconds
            while (left := deadline - time.monotonic()) > 0:
                for beat in beats:
                    beat.look(server)
                time.sleep(min(left, LOOK_EVERY))
            client.echo(END)
            port = 0
            for heard in monitor.listen():
                name, _, rest = heard["command"].partition(" ")
                if rest == END:
                    return
                # The commands of a script follow the script.
                in_script = heard["client_type"] == "lua"
                port = port if in_script else int(heard["client_port"])
                (beat,) = [one for one in beats if port in one.ports]
                beat.sent[IN_SCRIPT if in_script else name.upper()] += 1


def _start(exits: ExitStack, name: str, pair: Pair, urls: Mapping[str, str], directory: Path) -> Iterator[_Beat]:
    """Start two beats, one after the other: of RedBeat's, the second one is on standby."""
    for role, said, gap in (("first", pair.first, ""), ("second", pair.second, pair.gap)):
        title = f"{name}: {role}"
        log, schedule = directory / f"{title}.log", directory / f"{title}.schedule"
        command = ("beat", "-S", pair.scheduler, "-l", "DEBUG", "--pidfile", "", "-s", str(schedule))
        environment = {**urls, **pair.environment}
        process = exits.enter_context(celery("benchmarks.beat_app", *command, log=log, environment=environment))

        def has_begun(log: Path = log, said: str = said) -> bool:
            return said in log.read_text(errors="replace")

        wait_until(has_begun, LIMIT, f"{title} did not say {said!r}")
        yield _Beat(title, process.pid, gap)
