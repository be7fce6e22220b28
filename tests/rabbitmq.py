"""A private RabbitMQ for tests: on loopback, gone at the end of `with`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from kombu import Connection

from celery_singleton_lock import clock
from tests import ports
from tests.patience import LIMIT

#: Where the packages of Debian and of RabbitMQ put it; the program on the PATH insists on running as another user.
_PROGRAM = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
_CONTROL = _PROGRAM.with_name("rabbitmqctl")

#: Why there is no RabbitMQ on this machine; empty if there is one.
MISSING = "" if _PROGRAM.exists() and shutil.which("epmd") else "no rabbitmq-server here (Debian: rabbitmq-server)"


class RabbitMQ:
    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="rabbitmq-")
        self.port, epmd_port, dist_port = ports.free(), ports.free(), ports.free()
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}//"
        home = Path(self._directory.name)
        self._log = (home / "log").open("wb")
        self._environment = {
            **os.environ,
            "HOME": str(home),
            "ERL_EPMD_PORT": str(epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"test{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(dist_port),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "RABBITMQ_MNESIA_BASE": str(home / "data"),
            "RABBITMQ_LOG_BASE": str(home / "logs"),
            "RABBITMQ_CONFIG_FILE": str(home / "none"),
            "RABBITMQ_CONF_ENV_FILE": str(home / "none"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "plugins"),
        }
        # Not the daemon that RabbitMQ would start by itself: that one would stay.
        self._names = self._start(["epmd", "-port", str(epmd_port), "-address", "127.0.0.1"])
        self._server = self._start([str(_PROGRAM)])

    def __enter__(self) -> RabbitMQ:
        return self._wait_until_ready()

    def __exit__(self, *_: object) -> None:
        self.kill()
        _end(self._names)
        self._log.close()
        self._directory.cleanup()

    def pause(self) -> None:
        """Let it hang: it answers nobody and closes no connection."""
        os.killpg(self._server.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self._server.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it as if its host had died."""
        _end(self._server)

    def stop(self) -> None:
        """Stop it as a service is stopped: it closes its connections."""
        self.control("stop")
        self._server.wait()

    def restart(self) -> None:
        """Start it again with the data on its disk."""
        self._server = self._start([str(_PROGRAM)])
        self._wait_until_ready()

    def control(self, *command: str) -> str:
        """The output of `rabbitmqctl`."""
        return subprocess.run(
            [_CONTROL, "-q", *command], env=self._environment, check=True, capture_output=True, text=True
        ).stdout

    def _wait_until_ready(self) -> RabbitMQ:
        deadline = clock.now() + LIMIT
        while True:
            try:
                with Connection(self.url, connect_timeout=1) as connection:
                    connection.connect()
                return self
            except OSError as error:
                if clock.now() > deadline or self._server.poll() is not None:
                    log = Path(self._log.name).read_text(errors="replace")
                    self.__exit__()
                    raise RuntimeError(f"RabbitMQ did not start:\n{log[-2000:]}") from error
                clock.sleep(0.1)

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            env=self._environment,
            stdout=self._log,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to a server and all processes that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
