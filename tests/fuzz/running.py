"""Many random cases of one target; a failing case is reduced."""

from __future__ import annotations

import logging
import random
import resource
import signal
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from tests.fuzz.choices import Case, Choices, Stuck
from tests.fuzz.targets import TARGETS

#: Numbers of bytes that a case may have.
SIZES = (0, 2, 8, 24, 64, 160, 400)

#: Seconds of CPU time that one case may take: if it takes more it is stuck, however busy the machine is.
MOST_WORK = 20.0

#: Bytes of memory that a process may have: a case that needs more has found a fault.
MOST_MEMORY = 6 * 2**30

#: Attempts to reduce a case.
TRIES = 1000


class Found(AssertionError):
    """A fault.

    Attributes:
        data: of the smallest case that shows it.
        number: of the cases before it.
    """

    def __init__(self, target: str, data: bytes, error: BaseException) -> None:
        said = "".join(traceback.format_exception(error)[-12:]).encode("ascii", "backslashreplace").decode()
        super().__init__(f"{said}\nagain: python -m tests.fuzz {target} --data {data.hex() or '00'}")
        self.data, self.number = data, 0


def part_of(target: str, cases: int, seed: int) -> tuple[int, float, str]:
    """For a separate process: the number of cases, the seconds, and the fault if there was one."""
    quiet()
    began = time.monotonic()
    with TARGETS[target][0]() as case:
        try:
            done, found = by_chance(target, case, cases, seed), ""
        except Found as error:
            done, found = error.number, str(error)
    return done, time.monotonic() - began, found


def quiet() -> None:
    """Log nothing, and limit the memory of this process."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, resource.RLIM_INFINITY))


def by_chance(target: str, case: Case, cases: int, seed: int) -> int:
    """Run random cases; returns how many there were.

    Raises:
        Found: a case failed.
    """
    for number in range(cases):
        chance = random.Random(seed * 1_000_003 + number)
        try:
            once(target, case, chance.randbytes(chance.choice(SIZES)))
        except Found as found:
            found.number = number
            raise
    return cases


def once(target: str, case: Case, data: bytes) -> None:
    """Run a case.

    Raises:
        Found: it failed.
    """
    if (error := _failure(case, data)) is not None:
        small, error = _smaller(case, data, error)
        raise Found(target, small, error)


def _failure(case: Case, data: bytes) -> BaseException | None:
    try:
        with _limited():
            case(Choices(data))
    except (Exception, Stuck) as error:
        return error
    return None


def _smaller(case: Case, data: bytes, error: BaseException) -> tuple[bytes, BaseException]:
    """The smallest of the attempted cases that fails in the same way."""
    latest = [data]
    for _, candidate in zip(range(TRIES), _candidates(latest), strict=False):
        found = _failure(case, candidate)
        if found is not None and type(found) is type(error) and not isinstance(found, Stuck):
            latest[0], error = candidate, found
    return latest[0], error


def _candidates(latest: list[bytes]) -> Iterator[bytes]:
    """Cases that are smaller than the latest that failed."""
    size = 256
    while size:
        yield latest[0].rstrip(b"\0")
        at = 0
        while at < len(data := latest[0]):
            yield data[:at] + data[at + size :]
            yield data[:at] + bytes(len(data[at : at + size])) + data[at + size :]
            at += size
        size //= 2
    yield latest[0].rstrip(b"\0")


@contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Stuck(f"it has worked for {MOST_WORK:.0f} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_WORK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
