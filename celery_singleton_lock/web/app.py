"""The ASGI app: its addresses, and their answers."""

from __future__ import annotations

import socket
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from celery_singleton_lock.web import pages
from celery_singleton_lock.web.access import LOOPBACK, Guard, credentials
from celery_singleton_lock.web.actions import ACTIONS, act
from celery_singleton_lock.web.pages import MENU, PAGES, Question, View
from celery_singleton_lock.web.rendering import Asked, html, moment
from celery_singleton_lock.web.watch import Watch

#: Files that are sent as they are: the package that has them, and their types.
STATIC = {
    "page.css": ("celery_singleton_lock.journal", "text/css"),
    "page.js": ("celery_singleton_lock.web", "text/javascript"),
}

#: The most bytes of a form, and its most fields.
MOST_OF_A_FORM, MOST_FIELDS = 10_000, 20


def app_of(
    celery_app: Any, *, hosts: Collection[str] = LOOPBACK, token: str = "", allow_release: bool = False
) -> ASGIApp:
    """An ASGI app that shows the locks of a Celery app; mount it anywhere, or serve it with any ASGI server.

    Args:
        celery_app: the Celery app.
        hosts: the host names under which browsers may open the page; requests for another `Host` are refused.
        token: the password for the page, with any user name (HTTP Basic): at least 16 random characters.
        allow_release: let users release locks and stop tasks; needs a token.

    Raises:
        InvalidOption: a setting of the Celery app is wrong.
        ValueError: the token is missing or too short, or a name in `hosts` is a pattern such as `*`.
    """
    if allow_release and not token:
        raise ValueError("allow_release needs a token: give one of at least 16 random characters")
    return Guard(Site(celery_app, allow_release).app, hosts, token)


def serve(app: ASGIApp, listening: socket.socket) -> None:
    """Serve until Ctrl-C or SIGTERM; answers that are under way have a second to end."""
    with suppress(KeyboardInterrupt):  # The server has shut down cleanly by then.
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        uvicorn.Server(config).run(sockets=[listening])


class Site:
    """Answers requests, whoever asks.

    Args:
        celery_app: the Celery app.
        allow_release: whether locks can be released and tasks stopped.
    """

    def __init__(self, celery_app: Any, allow_release: bool) -> None:
        self._allow_release = allow_release
        self._watch = Watch(celery_app)
        routes = [Route(f"/{page}", partial(self._page, page)) for page in PAGES]
        routes += [Route(f"/{name}", partial(_file, name)) for name in STATIC]
        if allow_release:
            routes += [Route(f"/{action}", partial(self._act, action), methods=["POST"]) for action in ACTIONS]
        self.app = Starlette(routes=routes, exception_handlers={404: self._not_found})

    # Starlette calls what is not `async` in a thread: it asks the lock server.
    def _page(self, page: str, request: Request) -> Response:
        question = self._question(request)
        return self._shown(question, page, PAGES[page](question))

    def _not_found(self, request: Request, _: Exception) -> Response:
        return self._shown(self._question(request), "", pages.unknown("page", request.url.path))

    async def _act(self, action: str, request: Request) -> Response:
        form = await form_of(request)
        if form.get("sure") != "yes":
            return PlainTextResponse("Confirm it: tick the box of the form.\n", 400)
        return await run_in_threadpool(self._acted, action, form, request)

    def _acted(self, action: str, form: dict[str, str], request: Request) -> Response:
        user, client = credentials(request.headers)[0], request.client
        who = f"{user or 'somebody'} at {client.host if client else 'an unknown address'}"
        key = form.get("key", "")
        said = act(self._watch.app, action, key=key, mark=form.get("mark", ""), who=who)
        view = View("done.html", action.capitalize(), {"text": said, "key": key})
        return self._shown(self._question(request), action, view)

    def _question(self, request: Request) -> Question:
        base = str(request.scope.get("root_path", "")).rstrip("/")
        return Question(self._watch, self._watch.look(), Asked.of(request.query_params), base)

    def _shown(self, question: Question, page: str, view: View) -> Response:
        snapshot = question.snapshot
        known = f"You see what was true at {moment(snapshot.at)} UTC." if snapshot.at else "Nothing is known yet."
        context = {
            **view.context,
            "title": view.title,
            "page": page,
            "asked": question.asked,
            "base": question.base,
            "snapshot": snapshot,
            "trouble": f"The lock server does not answer: {snapshot.error}. {known}" if snapshot.error else "",
            "about": self._watch.about,
            "menu": MENU,
            "live": page in PAGES and view.status == 200,
            "allow_release": self._allow_release,
        }
        status = 503 if snapshot.error and view.status == 200 else view.status
        return HTMLResponse(html(view.template, context), status)


def _file(name: str, _: Request) -> Response:
    package, media_type = STATIC[name]
    headers = {"Cache-Control": "max-age=300"}
    return Response(files(package).joinpath(name).read_bytes(), media_type=media_type, headers=headers)


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form; none if it is too long, or has too many fields."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_OF_A_FORM:
            return {}
    try:
        return dict(parse_qsl(body.decode(errors="replace"), keep_blank_values=True, max_num_fields=MOST_FIELDS))
    except ValueError:
        return {}
