"""The ASGI app: its addresses, and their answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from celery_singleton_lock.contrib.prometheus import LockCollector
from celery_singleton_lock.web import pages
from celery_singleton_lock.web.access import COOKIE, LOOPBACK, SESSION, Access
from celery_singleton_lock.web.actions import ACTIONS, Wanted, can_be_stopped, mark_of
from celery_singleton_lock.web.asked import Asked
from celery_singleton_lock.web.examination import Examination
from celery_singleton_lock.web.guard import Guard, address_of, base_in, later, path_in, session_in, too_many
from celery_singleton_lock.web.live import Live, Stream
from celery_singleton_lock.web.pages import PAGES, View
from celery_singleton_lock.web.rendering import Renderers
from celery_singleton_lock.web.watch import Watch

#: Files that are sent as they are, and their types.
STATIC = {"page.css": "text/css", "page.js": "text/javascript"}

#: The most bytes of a form, and its most fields.
MOST_OF_A_FORM, MOST_FIELDS = 10_000, 20

NO_PROOF = "Sign in first; if the form was open for long, load it again.\n"

Answer = Callable[[Request], Awaitable[Response]]


def app_of(
    celery_app: Any,
    *,
    hosts: Collection[str] = LOOPBACK,
    token: str = "",
    allow_release: bool = False,
    private: bool = False,
) -> Guard:
    """An ASGI app that shows the locks of a Celery app; mount it anywhere, or serve it with any ASGI server.

    Args:
        celery_app: the Celery app.
        hosts: the host names under which browsers may open the page; requests for another `Host` are refused.
        token: the token for signing in: at least 16 random characters.
        allow_release: let signed-in users release locks and stop tasks.
        private: show the pages only to signed-in users.

    Raises:
        InvalidOption: a setting of the Celery app is wrong.
        ValueError: the token is missing or too short, or a name in `hosts` is a pattern such as `*`.
    """
    site = Site(celery_app, Access(hosts, token, allow_release, private))
    return Guard(site.app, site.access)


class Site:
    """Answers requests.

    Args:
        celery_app: the Celery app.
        access: what is allowed.
    """

    def __init__(self, celery_app: Any, access: Access) -> None:
        self.access = access
        self._watch = Watch(celery_app)
        self.live = Live(self._watch)
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
            "stream": self._stream,
            **dict.fromkeys(STATIC, self._file),
        }
        made = [Route(f"/{page}", self._page, name=f"page {page}") for page in PAGES]
        made += [Route(f"/{path}", answer) for path, answer in answers.items()]
        if self.access.token:
            made += [
                Route("/login", self._sign_in, methods=["GET", "POST"]),
                Route("/logout", self._sign_out, methods=["POST"]),
            ]
        if self.access.allow_release:
            made += [Route(f"/{action}", self._act, methods=["POST"]) for action in ACTIONS]
        return made

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

    async def _stream(self, request: Request) -> Response:
        page, asked = request.query_params.get("at", ""), Asked.of(request.query_params)
        if page not in PAGES:
            return PlainTextResponse("There is no such page.\n", 404)
        if request.method == "HEAD":
            return Response(media_type=Stream.media_type)
        if self.live.is_full:
            return PlainTextResponse("Too many pages listen already.\n", 503)
        render = self._renderers.at(base_of(request), moving=True)
        return Stream(self.live, lambda snapshot: PAGES[page](self._watch, snapshot, asked, render))

    async def _show_metrics(self, _: Request) -> Response:
        return Response(await run_in_threadpool(generate_latest, self._metrics), media_type=CONTENT_TYPE_LATEST)

    async def _file(self, request: Request) -> Response:
        name = page_of(request)
        return Response(self._static[name], media_type=STATIC[name], headers={"Cache-Control": "max-age=300"})

    async def _sign_in(self, request: Request) -> Response:
        if request.method != "POST":
            return await self._door(request, "", 200)
        token, address = (await form_of(request)).get("token", ""), address_of(request.scope)
        if seconds := self.access.tries.wait(address):
            refused = await self._door(request, too_many(seconds), 429)
            refused.headers.update(later(seconds))
            return refused
        if not self.access.is_token(token, address):
            return await self._door(request, "That is not the token.", 403)
        answer = RedirectResponse(self._renderers.at(base_of(request)).address(""), 303)
        answer.set_cookie(COOKIE, self.access.new_session(), **cookie_of(request))
        return answer

    async def _door(self, request: Request, wrong: str, status: int) -> Response:
        view = View("login.html", "Sign in", context={"wrong": wrong}, status=status)
        return await run_in_threadpool(self._shown, request, "login", view)

    async def _sign_out(self, request: Request) -> Response:
        if not self.access.is_form_proof(session_in(request.headers), (await form_of(request)).get("proof", "")):
            return PlainTextResponse(NO_PROOF, 403)
        answer = RedirectResponse(self._renderers.at(base_of(request)).address("login"), 303)
        answer.delete_cookie(COOKIE, path=cookie_of(request)["path"])
        return answer

    async def _act(self, request: Request) -> Response:
        form = await form_of(request)
        if not self.access.is_form_proof(session_in(request.headers), form.get("proof", "")):
            return PlainTextResponse(NO_PROOF, 403)
        if form.get("sure") != "yes":
            return PlainTextResponse("Confirm it: tick the box of the form.\n", 400)
        wanted = Wanted.of(form)
        outcome = await run_in_threadpool(ACTIONS[page_of(request)], self._watch.app, wanted)
        context = {"outcome": outcome, "key": wanted.key}
        view = View("done.html", "Done" if outcome.done else "Not done", context=context)
        return await run_in_threadpool(self._shown, request, "done", view)

    async def _not_found(self, request: Request, _: Exception) -> Response:
        return await run_in_threadpool(self._shown, request, "", pages.unknown("page", request.url.path))

    def _shown(self, request: Request, page: str, view: View | None) -> Response:
        """A page, made from what is known now; call it in a thread, since it asks the lock server."""
        asked, render = Asked.of(request.query_params), self._renderers.at(base_of(request))
        snapshot = self._watch.look()
        made = view or PAGES[page](self._watch, snapshot, asked, render)
        status = 503 if snapshot.error and made.status == 200 else made.status
        return HTMLResponse(
            pages.html(made, page, asked, snapshot, render, about=self._watch.about, **self._rights(request)), status
        )

    def _rights(self, request: Request) -> Mapping[str, Any]:
        """What the templates need to know about the user's rights."""
        session = session_in(request.headers)
        signed_in = self.access.is_session(session)
        return {
            "can_sign_in": bool(self.access.token),
            "allow_release": self.access.allow_release,
            "signed_in": signed_in,
            "proof": self.access.form_proof(session) if signed_in else "",
            "mark_of": mark_of,
            "can_be_stopped": can_be_stopped,
        }


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


def cookie_of(request: Request) -> dict[str, Any]:
    """How a session's cookie is kept."""
    return {
        "max_age": SESSION,
        "path": base_of(request) or "/",
        "secure": request.url.scheme == "https",
        "httponly": True,
        "samesite": "strict",
    }


def page_of(request: Request) -> str:
    """The part of the address that names the page."""
    return path_in(request.scope).strip("/")


def base_of(request: Request) -> str:
    return base_in(request.scope)
