"""The entry in the admin: each of the live pages, as it was when it was requested."""

from __future__ import annotations

from functools import cached_property
from importlib.resources import files
from typing import Any

from celery.app import app_or_default
from django.contrib import admin
from django.core.exceptions import ImproperlyConfigured
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.safestring import mark_safe

from celery_singleton_lock._celery import active_apps, is_stand_in
from celery_singleton_lock.web import pages
from celery_singleton_lock.web.asked import Asked
from celery_singleton_lock.web.django.models import ExclusiveLock
from celery_singleton_lock.web.examination import Examination
from celery_singleton_lock.web.pages import PAGES
from celery_singleton_lock.web.rendering import Renderers
from celery_singleton_lock.web.watch import Watch


@admin.register(ExclusiveLock)
class ExclusiveLockAdmin(admin.ModelAdmin):  # type: ignore[misc]
    """Shows the locks of the project's Celery app to its staff."""

    def get_urls(self) -> list[Any]:
        view = self.admin_site.admin_view  # Lets only staff through.
        return [
            path("", view(self.show), name=self._name("changelist")),
            path("page.css", view(self.style), name=self._name("style")),
            path("<str:page>", view(self.show), name=self._name("page")),
        ]

    def show(self, request: HttpRequest, page: str = "") -> HttpResponse:
        """One page."""
        if request.method not in ("GET", "HEAD"):
            return HttpResponse(status=405, headers={"Allow": "GET, HEAD"})
        asked, render = Asked.of(request.GET), self._renderers.at(self._base)
        if page == "search":
            found = pages.search(asked)
            to = render.address("locks", q=asked.search) if found is None else render.address(found, key=asked.search)
            return HttpResponseRedirect(to)
        if page not in PAGES and page != "doctor":
            raise Http404
        snapshot = self._watch.look()
        view = self._examination.view() if page == "doctor" else PAGES[page](self._watch, snapshot, asked, render)
        body = pages.html(view, page, asked, snapshot, render, about=self._watch.about, framed=False)
        context = {
            **self.admin_site.each_context(request),
            "title": view.title,
            "body": mark_safe(body),  # noqa: S308 - escaped where it was made
            "style": reverse(f"{self.admin_site.name}:{self._name('style')}"),
        }
        template = "admin/celery_singleton_lock_web/page.html"
        return TemplateResponse(request, template, context, status=view.status)

    def style(self, _: HttpRequest) -> HttpResponse:
        """The style sheet of the pages."""
        content = files("celery_singleton_lock.web").joinpath("static", "page.css").read_bytes()
        return HttpResponse(content, content_type="text/css")

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return bool(request.user.is_active and request.user.is_staff)

    def has_module_permission(self, request: HttpRequest) -> bool:
        return self.has_view_permission(request)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    @cached_property
    def _watch(self) -> Watch:
        return Watch(celery_app())

    @cached_property
    def _examination(self) -> Examination:
        return Examination(self._watch.app)

    @cached_property
    def _renderers(self) -> Renderers:
        return Renderers()

    @property
    def _base(self) -> str:
        address: str = reverse(f"{self.admin_site.name}:{self._name('changelist')}")
        return address.rstrip("/")

    def _name(self, page: str) -> str:
        return f"{self.opts.app_label}_{self.opts.model_name}_{page}"


def celery_app() -> Any:
    """The project's Celery app: the current app if this thread has one, otherwise the first by name.

    Raises:
        ImproperlyConfigured: there is no app.
    """
    current = app_or_default()
    made = [app for app in active_apps() if not is_stand_in(app)]
    if current in made:
        return current
    if not made:
        raise ImproperlyConfigured(
            "no Celery app is known; import it in your project's __init__.py: from .celery import app as celery_app"
        )
    return min(made, key=lambda app: str(app.main))
