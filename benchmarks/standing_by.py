"""What the second of two beats costs while the first one leads: real processes with an empty schedule."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from redis import Redis
from redis.client import Monitor

from benchmarks.beat_app import BROKER, LOCKS, LOOP
from benchmarks.measure import Row, Table
from celery_singleton_lock.testing import RedisServer

#: Seconds for a beat to start, and between two looks at which connections it has.
LIMIT, LOOK_EVERY = 30.0, 0.25

#: Seconds of RedBeat's loop in the second pair: by default 300.
SHORT_LOOP = 5.0

#: Ends the recording of commands.
END = "end of the recording"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two beats with one scheduler: what they log once they lead or wait, and how long until one that died is
    replaced.
    """

    scheduler: str
    leads: str
    waits: str
    gap: str
    environment: Mapping[str, str] = field(default_factory=dict)


_REDBEAT = Pair("redbeat:RedBeatScheduler", "beat: Acquired lock", "beat: Acquiring lock", "up to 1,500 + 300 s")

PAIRS: Mapping[str, Pair] = {
    "ours": Pair("exclusive", "beat: leads schedule", "beat: stands by", "up to 10 s"),
    "RedBeat": _REDBEAT,
    f"RedBeat, beat_max_loop_interval {SHORT_LOOP:g}": Pair(
        *(_REDBEAT.scheduler, _REDBEAT.leads, _REDBEAT.waits),
        f"up to {5 * SHORT_LOOP:g} + {SHORT_LOOP:g} s",
        {LOOP: str(SHORT_LOOP)},
    ),
}


def table(seconds: float) -> Table:
    """All pairs at the same time, each in its own database."""
    with ExitStack() as stack:
        broker, locks = (stack.enter_context(RedisServer()) for _ in range(2))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        beats = [
            beat
            for database, (name, pair) in enumerate(PAIRS.items())
            for beat in _start(stack, name, pair, [broker.url_of(database), locks.url_of(database)], directory)
        ]
        time.sleep(1.0)
        commands = _observe(locks, beats, seconds)
    rows = [Row(beat.name, None, beat.columns(commands, seconds)) for beat in beats]
    return Table("Standing by: two beats with an empty schedule", "", rows)


def notes(seconds: float) -> Sequence[str]:
    """What a reader of the table must know."""
    return [
        f"Standing by: `celery beat` processes, all pairs over the same {seconds:g} s. The commands are those of each"
        " process on the server of the locks, by MONITOR; a BLPOP that stays open since before is none. The share of a"
        f" core is seen in steps of {0.01 / seconds:.2%}.",
        "Until a dead one is replaced: by the settings, not measured; RedBeat's lock lasts five of its loops, and who"
        " waits for it looks once per loop. Ours knows sooner of a leader that died on the same host or stopped in"
        " order.",
    ]


@dataclass(frozen=True, slots=True)
class _Command:
    """One that the server has carried out: for the client at this port, or within a script of that client."""

    name: str
    port: int
    in_script: bool


class _Beat:
    """A beat that runs."""

    def __init__(self, name: str, pid: int, gap: str) -> None:
        self.name = name
        self._gap = gap
        self._process = psutil.Process(pid)
        self._ports: set[int] = set()
        self._used_before = self._used = 0.0

    def begin(self) -> None:
        """From now on its CPU time counts."""
        self._used_before = self._cpu()

    def look(self, server: RedisServer) -> None:
        """Note its connections, and its CPU time so far."""
        found = self._process.net_connections("tcp")
        self._ports |= {one.laddr.port for one in found if one.raddr and one.raddr.port == server.port}
        self._used = self._cpu() - self._used_before

    def has(self, command: _Command) -> bool:
        """Whether it asked for this."""
        return command.port in self._ports

    def columns(self, commands: Sequence[_Command], seconds: float) -> dict[str, str]:
        """What it did."""
        sent = [command.name for command in commands if self.has(command) and not command.in_script]
        within = sum(self.has(command) for command in commands) - len(sent)
        return {
            "commands/s": f"{len(sent) / seconds:.2f}",
            "within their scripts": f"{within / seconds:.2f}",
            "which": ", ".join(f"{count} {name}" for name, count in Counter(sent).most_common()),
            "share of a core": f"{self._used / seconds:.2%}",
            "a dead one is replaced after": self._gap,
        }

    def _cpu(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


def _observe(server: RedisServer, beats: Sequence[_Beat], seconds: float) -> Sequence[_Command]:
    """What the server does for `seconds`."""
    with server.client() as client, server.client() as other:
        client.ping()  # It is connected from now on, and will not be heard to.
        with other.monitor() as monitor:
            _watch(server, beats, seconds)
            commands = list(_recorded(client, monitor))
    if unknown := [command for command in commands if not any(beat.has(command) for beat in beats)]:
        raise AssertionError(f"commands of nobody: {unknown}")
    return commands


def _watch(server: RedisServer, beats: Sequence[_Beat], seconds: float) -> None:
    """For so long."""
    for beat in beats:
        beat.begin()
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, LOOK_EVERY))
        for beat in beats:
            beat.look(server)


def _recorded(client: Redis, monitor: Monitor) -> Iterator[_Command]:
    """The commands until now; those of a script follow it."""
    client.echo(END)
    port = 0
    for heard in monitor.listen():
        name, _, rest = heard["command"].partition(" ")
        if rest == END:
            return
        in_script = heard["client_type"] == "lua"
        port = port if in_script else int(heard["client_port"])
        yield _Command(name.upper(), port, in_script)


def _start(stack: ExitStack, name: str, pair: Pair, urls: Sequence[str], directory: Path) -> Iterator[_Beat]:
    """Two beats, one after the other: so it is known who leads."""
    for role, said, gap in (("leads", pair.leads, ""), ("stands by", pair.waits, pair.gap)):
        title = f"{name}: {role}"
        process = stack.enter_context(_process(pair, urls, directory / title, said))
        yield _Beat(title, process.pid, gap)


@contextmanager
def _process(pair: Pair, urls: Sequence[str], directory: Path, said: str) -> Iterator[subprocess.Popen[bytes]]:
    """A beat that has logged this."""
    directory.mkdir()
    command = [sys.executable, "-m", "celery", "-A", "benchmarks.beat_app", "beat", "-S", pair.scheduler, "-l", "DEBUG"]
    command += ["--pidfile", "", "-s", str(directory / "schedule")]
    environment = {**os.environ, **dict(zip((BROKER, LOCKS), urls, strict=True)), **pair.environment}
    log = directory / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        _wait_for(said, log)
        yield process
    finally:
        process.kill()
        process.wait()


def _wait_for(said: str, log: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while said not in (text := log.read_text(errors="replace")):
        if time.monotonic() > deadline:
            raise TimeoutError(f"beat did not say {said!r} in {LIMIT:g} s:\n{text[-3000:]}")
        time.sleep(0.02)
