"""Pages and their rows as HTML; every value from elsewhere is escaped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import jinja2
from markupsafe import Markup

from celery_singleton_lock.diagnosis.held import GONE, duration
from celery_singleton_lock.web.chart import HEIGHT, short
from celery_singleton_lock.web.snapshot import moment

#: The most base addresses of one app for which renderers are kept.
MOST_BASES = 8


class Renderers:
    """Keeps renderers, because reading templates takes time."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, bool], Renderer] = {}

    def at(self, base: str, *, moving: bool = False) -> Renderer:
        """The renderer for pages below an address, see `Renderer`."""
        found = self._made.get((base, moving))
        if found is None:
            if len(self._made) >= MOST_BASES:
                self._made.clear()
            found = self._made[base, moving] = Renderer(base, moving=moving)
        return found


class Renderer:
    """Makes HTML.

    Args:
        base: the address below which the pages are, without a slash at its end.
        moving: leave out of rows what a script fills in, so that they stay the same until something happens.
    """

    def __init__(self, base: str, *, moving: bool = False) -> None:
        self._base = base
        self._environment = jinja2.Environment(
            loader=jinja2.PackageLoader("celery_singleton_lock.web"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.globals.update(
            address=self.address,
            duration=duration,
            moment=moment,
            seconds=seconds,
            short=short,
            GONE=GONE,
            HEIGHT=HEIGHT,
            moving=moving,
        )

    def address(self, page: str, /, **query: object) -> str:
        """The address of a page; None and empty values are left out of its query."""
        asked = {name: value for name, value in query.items() if value is not None and value != ""}
        return f"{self._base}/{page}" + (f"?{urlencode(asked)}" if asked else "")

    def row(self, kind: str, **values: Any) -> Markup:
        """A row of a table."""
        macro = getattr(self._environment.get_template("rows.html").module, kind)
        made: Markup = macro(**values)
        return made

    def page(self, template: str, context: Mapping[str, Any]) -> str:
        return self._environment.get_template(template).render(context)


def seconds(value: float) -> str:
    """A short duration in words."""
    return f"{value:.3g} s" if value < 100 else duration(value)
