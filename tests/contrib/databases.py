"""Private databases for tests: on loopback, and gone when `with` ends."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import psycopg
import pymysql

from celery_singleton_lock import clock
from tests import ports
from tests.patience import LIMIT

#: Seconds that a transaction waits for another one on SQLite: longer than any transaction in a test.
_PATIENCE = 30


class Sqlite:
    """A file, for SQLAlchemy and for Django."""

    name = "sqlite"

    def __init__(self, path: Path) -> None:
        self.url = f"sqlite:///{path}?timeout={_PATIENCE}"
        options = {"timeout": _PATIENCE}
        self.django = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path), "OPTIONS": options}

    def waiting(self) -> bool:
        """Whether a transaction waits for another one. SQLite does not say: it may."""
        return True


class Server:
    """A database server that any user of the machine may log in to, as `tests`, without a password."""

    name: str
    url: str
    django: dict[str, Any]

    #: Debian's package, the folders (not on the PATH) where it keeps its programs, and the programs that are needed.
    package: str
    folders: str
    programs: tuple[str, ...]

    #: Ends its children as well.
    stopped_by = signal.SIGTERM

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=f"singleton-lock-{self.name}-")
        # Database servers refuse to run as root.
        self._user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
        if self._user:
            os.chown(self._folder.name, self._user.pw_uid, self._user.pw_gid)
        self._log = (Path(self._folder.name) / "log").open("wb")
        self.port = ports.free()
        self._process = self._launch(str(Path(self._folder.name) / "data"))

    def __enter__(self) -> Server:
        deadline = clock.now() + LIMIT
        while True:
            try:
                self._prepare()
                return self
            except (psycopg.OperationalError, pymysql.OperationalError) as error:
                if clock.now() > deadline or self._process.poll() is not None:
                    log = Path(self._log.name).read_text(errors="replace")
                    self.__exit__()
                    raise RuntimeError(f"{self.name} did not start:\n{log[-2000:]}") from error
                clock.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(self.stopped_by)
        self._process.wait(LIMIT)
        self._log.close()
        self._folder.cleanup()

    @classmethod
    def missing(cls) -> str:
        """Why this machine has no such server; empty if it has one."""
        found = all(cls._find(program) for program in cls.programs)
        return "" if found else f"no {cls.name} server here (Debian: {cls.package})"

    def waiting(self) -> bool:
        """Whether a transaction waits for another one."""
        raise NotImplementedError

    def _launch(self, data: str) -> subprocess.Popen[bytes]:
        raise NotImplementedError

    def _prepare(self) -> None:
        raise NotImplementedError

    @classmethod
    def _find(cls, program: str) -> str | None:
        beside = sorted(map(str, Path("/").glob(cls.folders)))
        return shutil.which(program) or shutil.which(program, path=os.pathsep.join(reversed(beside)))

    def _start(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [str(self._find(program)), *arguments],
            cwd=self._folder.name,
            env={**os.environ, "TMPDIR": self._folder.name},
            stdout=self._log,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            user=self._user.pw_uid if self._user else None,
            group=self._user.pw_gid if self._user else None,
            extra_groups=[] if self._user else None,
        )


class Postgres(Server):
    name = "postgres"
    package = "postgresql"
    folders = "usr/lib/postgresql/*/bin"
    programs = ("initdb", "postgres")
    stopped_by = signal.SIGINT

    def _launch(self, data: str) -> subprocess.Popen[bytes]:
        login = {"USER": "tests", "HOST": "127.0.0.1", "PORT": self.port}
        self.url = f"postgresql+psycopg://tests@127.0.0.1:{self.port}/postgres"
        self.django = {"ENGINE": "django.db.backends.postgresql", "NAME": "postgres", **login}
        made = ("-D", data, "-U", "tests", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        self._start("initdb", *made).wait(LIMIT)
        settings = {"listen_addresses": "127.0.0.1", "port": self.port, "unix_socket_directories": "", "fsync": "off"}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return self._start("postgres", "-D", data, *options)

    def _prepare(self) -> None:
        self._ask("SELECT 1")

    def waiting(self) -> bool:
        return bool(self._ask("SELECT 1 FROM pg_locks WHERE NOT granted LIMIT 1"))

    def _ask(self, query: Any) -> list[Any]:
        login = {"host": "127.0.0.1", "port": self.port, "user": "tests", "dbname": "postgres"}
        with psycopg.connect(**login) as connection:
            return connection.execute(query).fetchall()


class MariaDB(Server):
    name = "mariadb"
    package = "mariadb-server"
    folders = "usr/sbin"
    programs = ("mariadb-install-db", "mariadbd")

    def _launch(self, data: str) -> subprocess.Popen[bytes]:
        login = {"USER": "tests", "HOST": "127.0.0.1", "PORT": self.port}
        self.url = f"mysql+pymysql://tests@127.0.0.1:{self.port}/tests"
        self.django = {"ENGINE": "django.db.backends.mysql", "NAME": "tests", **login}
        self._start("mariadb-install-db", "--no-defaults", f"--datadir={data}", "--skip-test-db").wait(LIMIT)
        places = (f"--datadir={data}", "--bind-address=127.0.0.1", f"--port={self.port}", f"--socket={data}/socket")
        return self._start(
            "mariadbd", "--no-defaults", *places, "--skip-grant-tables", "--innodb-flush-log-at-trx-commit=0"
        )

    def _prepare(self) -> None:
        self._ask("CREATE DATABASE IF NOT EXISTS tests CHARACTER SET utf8mb4")

    def waiting(self) -> bool:
        # Not of information_schema.innodb_trx: it stays as it is while it is read more often than ten times a second.
        ((_, waits),) = self._ask("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'")
        return int(waits) > 0

    def _ask(self, query: str) -> Any:
        connection = pymysql.connect(host="127.0.0.1", port=self.port, user="tests", autocommit=True)
        with connection, connection.cursor() as cursor:
            cursor.execute(query)
            return cursor.fetchall()


Database = Sqlite | Server
