from __future__ import annotations

import os
import subprocess
import sys

import pytest

from celery_singleton_lock import process_identity

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="by /proc")

ASK = "from celery_singleton_lock import process_identity; print(process_identity.own(), flush=True); input()"


@pytest.fixture
def other() -> subprocess.Popen[str]:
    """Another process that waits; closing its input ends it."""
    with subprocess.Popen(
        [sys.executable, "-c", ASK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as other:
        yield other


def test_living_process_is_not_over(other: subprocess.Popen[str]) -> None:
    assert not process_identity.is_dead(process_identity.own())
    assert not process_identity.is_dead(other.stdout.readline().strip())


def test_ended_process_is_over(other: subprocess.Popen[str]) -> None:
    identity = other.stdout.readline().strip()
    other.stdin.close()
    # It has ended, but is not reaped: a zombie holds nothing any more.
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    assert process_identity.is_dead(identity)
    other.wait()
    assert process_identity.is_dead(identity)


def test_process_whose_pid_was_reused_is_over() -> None:
    place, pid, start = process_identity.own().split("/")
    assert process_identity.is_dead(f"{place}/{pid}/{int(start) - 1}")


def test_process_of_another_user_is_not_over() -> None:
    place, _, _ = process_identity.own().split("/")
    _, start = process_identity._state_and_start(1)
    assert not process_identity.is_dead(f"{place}/1/{start}")


@pytest.mark.parametrize("text", ["", "x", "//", "a/b/c", "0123456789ab/1/1", "0123456789ab/99999999/1", "a/1", "/1/2"])
def test_process_that_did_not_run_here_is_never_over(text: str) -> None:
    assert not process_identity.is_dead(text)


@pytest.mark.parametrize("pid", ["", "-1", "0x1", "٣", "1.5", "one"])
def test_invalid_pid_is_never_over(pid: str) -> None:
    place = process_identity.own().split("/")[0]
    assert not process_identity.is_dead(f"{place}/{pid}/1")


def test_forked_child_has_its_own_identity() -> None:
    readable, writable = os.pipe()
    mine = process_identity.own()
    if (pid := os.fork()) == 0:
        os.write(writable, process_identity.own().encode())
        os._exit(0)
    os.waitpid(pid, 0)  # Waits for this PID only, since another test's child may end just now.
    theirs = os.read(readable, 200).decode()
    os.close(readable)
    os.close(writable)
    assert theirs != mine
    assert process_identity.is_dead(theirs)
