"""Runs a page of the documentation as its reader would: `python -m tests.pages docs/tutorial.md`.

All blocks of a page run in order, in one directory and one namespace, with a Redis of their own instead of
`localhost:6379`:

- a `python` block whose first line is `# name.py` is written to that file; any other block is run; a block that begins
  with `>>>` must print what it shows;
- the commands of a `console` block are run, and must print what is shown. Workers and beats run until the end of the
  page; their logs must show what the page shows of them, with a command or without one. `^C` interrupts the last
  program that was started;
- an HTML comment that begins with `run:` is run but not shown; `not run:` in front of a block says why it is not run.

What changes from run to run may differ from what is shown: ids, times, seconds, process ids. `…` matches anything.
"""

from __future__ import annotations

import doctest
import gc
import io
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from celery.contrib.testing.worker import start_worker

from celery_singleton_lock import clock
from tests.patience import LIMIT
from tests.redis_server import RedisServer

#: What changes from run to run.
VARIABLE = (
    (r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", r"[0-9a-f-]{36}"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}", r"[\\d :,-]{23}"),
    (r"fence \d+", r"fence \\d+"),
    (r"\d+(?:\.\d+)?(?= ?s\b)", r"\\d+(?:\\.\\d+)?"),
    (r"\d+\.\d{5,}(?=s)", r"\\d+\\.\\d+"),
)

#: Minimum of seconds that a reader takes to type the next line: what is sent at once may start in either order.
TYPING = 0.3

#: Commands that a reader needs and a test does not: what they install is there.
ALREADY_DONE = ("pip ", "python -m pip ", "docker ", "redis-server", "git ", "make ")

_BLOCK = re.compile(
    r"^<!-- run:\n(?P<hidden>.*?)^-->$"
    r"|(?P<not_run>^<!-- not run: [^>]+ -->\n)?^```(?P<language>python|console)\n(?P<source>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Wrong(Exception):
    """Something is not as the page shows it."""


@dataclass(frozen=True)
class Block:
    language: str
    source: str
    line: int


def blocks(text: str) -> Iterator[Block]:
    """What is to be run of a page, in order."""
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start()) + 2
        if found["hidden"] is not None:
            yield Block("python", found["hidden"], line)
        elif not found["not_run"]:
            yield Block(found["language"], found["source"], line)


@dataclass
class Program:
    """A worker or a beat, in its own process group."""

    process: subprocess.Popen[bytes]
    log: Path

    def wait_for(self, shown: re.Pattern[str]) -> re.Match[str]:
        deadline = clock.now() + LIMIT
        while not (found := shown.search(self.log.read_text())):
            if clock.now() > deadline or self.process.poll() is not None:
                raise Wrong(f"its log does not show what the page does:\n{self.log.read_text()[-3000:]}")
            clock.sleep(0.02)
        return found

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class Reader:
    """A reader who follows the instructions of a page."""

    server: RedisServer
    directory: Path
    exits: ExitStack
    programs: list[Program] = field(default_factory=list)
    pids: dict[str, str] = field(default_factory=dict)
    worker: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.namespace: dict[str, Any] = {"__name__": "__main__", "start_worker": self._start_worker}
        self._numbers = itertools.count()

    def run(self, block: Block) -> None:
        source = self._here(block.source)
        if block.language == "console":
            self._type(source)
        elif named := re.match(r"# ([\w/]+\.py)\n", source):
            (self.directory / named[1]).parent.mkdir(parents=True, exist_ok=True)
            (self.directory / named[1]).write_text(source)
        elif source.startswith(">>>"):
            self._converse(source)
        else:
            exec(compile("\n" * (block.line - 1) + source, "page", "exec"), self.namespace)

    def _here(self, source: str) -> str:
        return source.replace("localhost:6379", f"127.0.0.1:{self.server.port}").replace(
            "Redis()", f"Redis(port={self.server.port})"
        )

    def _converse(self, source: str) -> None:
        reader, report = self, io.StringIO()

        class Checker(doctest.OutputChecker):
            def check_output(self, want: str, got: str, _: int) -> bool:
                clock.sleep(TYPING)
                return want == got or reader._pattern(want).fullmatch(got) is not None

        test = doctest.DocTestParser().get_doctest(source, self.namespace, "page", None, 0)
        test.globs = self.namespace
        doctest.DocTestRunner(Checker(), verbose=False).run(test, out=report.write, clear_globs=False)
        if report.getvalue():
            raise Wrong(report.getvalue())

    def _type(self, source: str) -> None:
        for step in re.split(r"^(?=\$ |\^C$)", source, flags=re.MULTILINE):
            if not step:
                continue
            command, _, shown = step.partition("\n")
            if command == "^C":
                self._interrupt(shown)
            elif not command.startswith("$ "):
                self._watch(step)
            elif not command.startswith(tuple(f"$ {done}" for done in ALREADY_DONE)):
                self._command(command.removeprefix("$ "), shown)

    def _command(self, command: str, shown: str) -> None:
        words = [self.pids.get(word, word) for word in shlex.split(command)]
        if words[0] in ("celery", "python"):
            words = [sys.executable, *(("-m", "celery") if words[0] == "celery" else ()), *words[1:]]
        if {"worker", "beat"} & set(words):
            log = self.directory / f"{next(self._numbers)}.log"
            with log.open("wb") as output:
                process = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True)
            self.programs.append(Program(process, log))
            self.exits.callback(self.programs[-1].kill)
            self._learn(shown, self.programs[-1].wait_for(self._pattern(shown, between=True)))
            return
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, check=False)
        found = self._pattern(shown).fullmatch(done.stdout + done.stderr)
        if not found:
            raise Wrong(f"$ {command}\nshown:\n{shown}\nprinted:\n{done.stdout}{done.stderr}")
        self._learn(shown, found)
        if words[0] == "kill":
            for killed in (program for program in self.programs if str(program.process.pid) == words[-1]):
                killed.process.wait(LIMIT)

    def _watch(self, shown: str) -> None:
        """Wait for the output of the program that was started last and still runs."""
        alive = [program for program in self.programs if program.process.poll() is None]
        alive[-1].wait_for(self._pattern(shown, between=True))

    def _interrupt(self, shown: str) -> None:
        program = self.programs.pop()
        os.killpg(program.process.pid, signal.SIGINT)
        program.process.wait(LIMIT)
        if not self._pattern(shown, between=True).search(program.log.read_text()):
            raise Wrong(f"shown:\n{shown}\nits log:\n{program.log.read_text()[-3000:]}")

    def _learn(self, shown: str, found: re.Match[str]) -> None:
        """Note which process ids the page means."""
        self.pids.update(zip(re.findall(r"pid (\d+)", shown), found.groups(), strict=True))

    def _pattern(self, shown: str, *, between: bool = False) -> re.Pattern[str]:
        """A pattern for what may be printed where the page shows this, with or without more lines in between."""
        lines = []
        for line in shown.splitlines(keepends=True):
            pattern = re.escape(line).replace("\\ ", " ").replace("\\-", "-")
            for variable, any_other in VARIABLE:
                pattern = re.sub(variable, any_other, pattern.replace("\\.", "."))
            pattern = re.sub(r"pid \d+", r"pid (\\d+)", pattern)
            lines.append(r"(?:.*\n)*?" if line == "…\n" else pattern.replace("…", ".*?"))
        return re.compile((r"(?:.*\n)*?.*?" if between else "").join(lines))

    def _start_worker(self, app: Any, concurrency: int = 4) -> None:
        """A worker of the page's app in this process; it replaces one that does not know later tasks."""
        self.worker.close()
        options = {"pool": "threads", "concurrency": concurrency, "perform_ping_check": False, "loglevel": "WARNING"}
        self.worker.enter_context(start_worker(app, shutdown_timeout=LIMIT, **options))
        self.exits.callback(self.worker.close)


def main(page: Path) -> int:
    """Run a page; the status is 1 if something is not as shown."""
    text = page.read_text()
    with ExitStack() as exits:
        directory = exits.enter_context(tempfile.TemporaryDirectory())
        server = exits.enter_context(RedisServer())
        os.chdir(directory)
        sys.path.insert(0, directory)
        reader = Reader(server, Path(directory), exits)
        # Results unsubscribe when they are forgotten: once it is gone, each tries to reach it for twenty seconds.
        exits.callback(gc.collect)
        exits.callback(reader.namespace.clear)
        for block in blocks(text):
            try:
                reader.run(block)
            except Exception as error:  # noqa: BLE001 - whatever a page does
                told = str(error) if isinstance(error, Wrong) else traceback.format_exc()
                print(f"{page}:{block.line}: {told}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
