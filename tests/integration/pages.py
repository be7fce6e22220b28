"""The live page as a program: `celery locks web` for a shop."""

from __future__ import annotations

import re
import signal
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import programs
from tests.integration.conftest import Shop
from tests.integration.operators import APP, environment_of
from tests.patience import LIMIT, until


class Site:
    """A page that is served.

    Attributes:
        url: without a slash at its end.
        told: what the program printed before it was ready.
        output: reads all that it has printed so far.
    """

    def __init__(self, url: str, told: str, output: Callable[[], str]) -> None:
        self.url = url
        self.told = told
        self.output = output

    def read(self, address: str = "/") -> tuple[int, str]:
        """The status and the text of a page."""
        try:
            with urllib.request.urlopen(f"{self.url}{address}", timeout=LIMIT) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()


@contextmanager
def site(shop: Shop, *arguments: str, logs: str = "", **variables: str) -> Iterator[Site]:
    """Serve the page of a shop; the program must end well when it is interrupted, and log only lines with `logs`."""
    command = ["-A", APP, "locks", "web", "--port", "0", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        output.touch()
        program = programs.start("celery", command, environment={**environment_of(shop), **variables}, output=output)
        try:
            ready = re.compile(r"locks at (http://\S+)/\n")
            until(lambda: ready.search(output.read_text()) or program.poll() is not None)
            found = ready.search(output.read_text())
            assert found, output.read_text()
            told = found.string[: found.end()]
            yield Site(found[1], told, output.read_text)
        finally:
            program.send_signal(signal.SIGINT)
            status = program.wait(LIMIT)
        more = output.read_text().removeprefix(told).splitlines()
        assert (status, [line for line in more if not logs or logs not in line]) == (0, [])
