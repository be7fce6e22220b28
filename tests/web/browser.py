"""A real browser, Debian's chromium, to which this process serves the page."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvicorn
from playwright.sync_api import Browser, sync_playwright
from starlette.types import ASGIApp

from tests.patience import LIMIT, until

#: Programs that can be used.
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def launched() -> Iterator[Browser]:
    """A headless browser; without one, the test that asks for it is skipped, or fails where BROWSER_TESTS=required."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None and os.environ.get("BROWSER_TESTS") == "required":
        pytest.fail("no chromium here")
    if program is None:
        pytest.skip("no chromium here (apt-get install chromium)")
    with sync_playwright() as playwright:
        # It runs as root in containers, where its sandbox does not work.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """Serve an ASGI app; yields its address without a trailing slash."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(LIMIT)
