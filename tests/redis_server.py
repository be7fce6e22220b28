"""A Redis server that tests pause, kill, and start again at its address."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Sequence

from celery_singleton_lock import testing
from tests import ports


class RedisServer(testing.RedisServer):
    """A `testing.RedisServer` that keeps its port, also while it does not run.

    Args:
        arguments, password: see there.
        port: the port to listen on; 0 for a free port.
    """

    def __init__(self, arguments: Sequence[str] = (), *, password: str | None = None, port: int = 0) -> None:
        #: Keeps the port while the server does not run.
        self._placeholder = contextlib.ExitStack()
        self.port = port
        self._given = tuple(arguments)
        super().__init__(arguments, password=password)
        self.port = self._port

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
        return self._url_of(database)

    def stop(self) -> None:
        super().stop()
        self._placeholder.close()

    def restart(self) -> None:
        """Kill the server and start it again, empty, at the same address."""
        self.kill()
        self.start()

    def kill(self) -> None:
        """Kill the server; `start` starts it again."""
        self._kill()

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

    def _free_port(self) -> int:
        return self.port or ports.free()

    def _launch(self) -> None:
        self._placeholder.close()
        self._arguments = ("--unixsocket", self.unix_socket, *self._given)
        super()._launch()

    def _kill(self) -> None:
        was_running = self._process is not None
        super()._kill()
        if was_running and self.port:
            self._keep_port()

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
