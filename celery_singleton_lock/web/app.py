"""The ASGI app: addresses, and what is answered to them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from importlib.resources import files
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from celery_singleton_lock.contrib.prometheus import LockCollector
from celery_singleton_lock.web import pages
from celery_singleton_lock.web.access import LOOPBACK, Access
from celery_singleton_lock.web.asked import Asked
from celery_singleton_lock.web.examination import Examination
from celery_singleton_lock.web.guard import Guard
from celery_singleton_lock.web.pages import PAGES, View
from celery_singleton_lock.web.rendering import Renderers
from celery_singleton_lock.web.watch import Watch

#: Files that are sent as they are, and their types.
STATIC = {"page.css": "text/css", "page.js": "text/javascript"}

Answer = Callable[[Request], Awaitable[Response]]


def app_of(celery_app: Any, *, hosts: Collection[str] = LOOPBACK) -> Guard:
    """An ASGI app that shows the locks of a Celery app; mount it anywhere, or have any ASGI server serve it.

    Args:
        celery_app: Celery's.
        hosts: names by which browsers may call the page; requests for another `Host` are refused.

    Raises:
        InvalidOption: a setting of the Celery app is wrong.
    """
    site = Site(celery_app, Access(hosts))
    return Guard(site.app, site.access)


class Site:
    """Answers requests.

    Args:
        celery_app: Celery's.
        access: what is allowed.
    """

    def __init__(self, celery_app: Any, access: Access) -> None:
        self.access = access
        self._watch = Watch(celery_app)
        self._examination = Examination(celery_app)
        self._renderers = Renderers()
        self._metrics = CollectorRegistry()
        self._metrics.register(LockCollector(self._watch.runtime))
        self._static = {name: files(__package__).joinpath("static", name).read_bytes() for name in STATIC}
        self.app = Starlette(routes=[*self._routes()], exception_handlers={404: self._not_found})

    def _routes(self) -> list[Route]:
        answers: Mapping[str, Answer] = {
            "doctor": self._doctor,
            "metrics": self._show_metrics,
            "search": self._search,
            **dict.fromkeys(STATIC, self._file),
        }
        made = [Route(f"/{page}", self._page, name=f"page {page}") for page in PAGES]
        return [*made, *(Route(f"/{path}", answer) for path, answer in answers.items())]

    async def _page(self, request: Request) -> Response:
        return await run_in_threadpool(self._shown, request, page_of(request), None)

    async def _doctor(self, request: Request) -> Response:
        view = await run_in_threadpool(self._examination.view)
        return await run_in_threadpool(self._shown, request, "doctor", view)

    async def _search(self, request: Request) -> Response:
        asked, render = Asked.of(request.query_params), self._renderers.at(base_of(request))
        page = pages.search(asked)
        to = render.address("locks", q=asked.search) if page is None else render.address(page, key=asked.search)
        return RedirectResponse(to, 303)

    async def _show_metrics(self, _: Request) -> Response:
        return Response(await run_in_threadpool(generate_latest, self._metrics), media_type=CONTENT_TYPE_LATEST)

    async def _file(self, request: Request) -> Response:
        name = page_of(request)
        return Response(self._static[name], media_type=STATIC[name], headers={"Cache-Control": "max-age=300"})

    async def _not_found(self, request: Request, _: Exception) -> Response:
        return await run_in_threadpool(self._shown, request, "", pages.unknown("page", request.url.path))

    def _shown(self, request: Request, page: str, view: View | None) -> Response:
        """A page, made from what is known now; in a thread, since it asks the lock server."""
        asked, render = Asked.of(request.query_params), self._renderers.at(base_of(request))
        snapshot = self._watch.look()
        made = view or PAGES[page](self._watch, snapshot, asked, render)
        status = 503 if snapshot.error and made.status == 200 else made.status
        return HTMLResponse(pages.html(made, page, asked, snapshot, render, about=self._watch.about), status)


def page_of(request: Request) -> str:
    """The part of the address that says which page."""
    path: str = request.scope["path"]
    return path.removeprefix(base_of(request)).strip("/")


def base_of(request: Request) -> str:
    """The address below which the pages are."""
    return str(request.scope.get("root_path", "")).rstrip("/")
