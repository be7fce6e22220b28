"""A private PostgreSQL, for tests: on loopback, gone with `with`."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import psycopg

from celery_singleton_lock import clock

#: Seconds that it may take to start.
_LIMIT = 60


def _find_programs() -> Path | None:
    """The folder of its programs: Debian keeps them off the PATH."""
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return folders[-1] if folders else None


_PROGRAMS = _find_programs()

#: Why there is none on this machine; empty if there is one.
MISSING = "" if _PROGRAMS else "no PostgreSQL server here (Debian: postgresql)"


class Postgres:
    """A server that any user of the machine may log in to, as `tests`, without a password."""

    def __init__(self) -> None:
        assert _PROGRAMS is not None, MISSING
        self._folder = tempfile.TemporaryDirectory(prefix="singleton-lock-postgres-")
        data = Path(self._folder.name) / "data"
        # It refuses to run as root.
        self._user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
        if self._user:
            os.chown(self._folder.name, self._user.pw_uid, self._user.pw_gid)
        self.port = _free_port()
        self._log = (Path(self._folder.name) / "log").open("wb")
        made = ["initdb", "-D", str(data), "-U", "tests", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
        self._start(*made).wait(_LIMIT)
        settings = {"listen_addresses": "127.0.0.1", "port": self.port, "unix_socket_directories": "", "fsync": "off"}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        self._server = self._start("postgres", "-D", str(data), *options)

    def __enter__(self) -> Postgres:
        deadline = clock.now() + _LIMIT
        while True:
            try:
                self.connect().close()
                return self
            except psycopg.OperationalError as error:
                if clock.now() > deadline or self._server.poll() is not None:
                    self.__exit__()
                    raise RuntimeError("PostgreSQL did not start") from error
                clock.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        # A fast shutdown: its children go with it.
        self._server.send_signal(signal.SIGINT)
        self._server.wait(_LIMIT)
        self._log.close()
        self._folder.cleanup()

    @property
    def address(self) -> dict[str, Any]:
        return {"host": "127.0.0.1", "port": self.port, "user": "tests", "dbname": "postgres"}

    def connect(self) -> psycopg.Connection:
        return psycopg.connect(**self.address, autocommit=True)

    def waiting(self) -> int:
        """How many transactions wait for another one."""
        with self.connect() as connection:
            (count,) = connection.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone() or (0,)
            return int(count)

    def _start(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        assert _PROGRAMS is not None
        return subprocess.Popen(
            [str(_PROGRAMS / program), *arguments],
            cwd=self._folder.name,
            stdout=self._log,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            user=self._user.pw_uid if self._user else None,
            group=self._user.pw_gid if self._user else None,
            extra_groups=[] if self._user else None,
        )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
