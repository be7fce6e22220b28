"""The live page as a program: `celery locks web` for a shop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from tests.integration.conftest import Shop
from tests.integration.operators import APP, environment_of
from tests.patience import LIMIT
from tests.programs import ROOT


class Site:
    """A page that is served.

    Attributes:
        url: without a slash at its end.
        told: what the program printed before it was ready.
    """

    def __init__(self, url: str, told: str) -> None:
        self.url = url
        self.told = told

    def read(self, address: str = "/") -> tuple[int, str]:
        """The status and the text of a page."""
        try:
            with urllib.request.urlopen(f"{self.url}{address}", timeout=LIMIT) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()


@contextmanager
def site(shop: Shop, *arguments: str, **variables: str) -> Iterator[Site]:
    """Serve the page of a shop; the program must end well when it is interrupted, without complaints."""
    command = [sys.executable, "-m", "celery", "-A", APP, "locks", "web", "--port", "0", *arguments]
    env = {**os.environ, **environment_of(shop), "PYTHONUNBUFFERED": "1", **variables}
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as program:
        try:
            assert program.stdout is not None
            told = ""
            while not (found := re.search(r"locks at (http://\S+)/\n", told)):
                line = program.stdout.readline()
                assert line, told
                told += line
            yield Site(found[1], told)
        finally:
            program.send_signal(signal.SIGINT)
            status = program.wait(LIMIT)
        assert (status, program.stdout.read()) == (0, "")
