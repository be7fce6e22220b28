"""Pages as HTML; every value from elsewhere is escaped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import jinja2

from celery_singleton_lock import cleaned
from celery_singleton_lock.diagnosis.held import GONE
from celery_singleton_lock.journal import timeline, words
from celery_singleton_lock.keys.key import name_in, without_queue
from celery_singleton_lock.web.actions import can_be_stopped, mark_of


def address(base: str, page: str, /, **query: object) -> str:
    """The address of a page below `base`; None and empty values are left out of its query."""
    asked = {name: value for name, value in query.items() if value is not None and value != ""}
    return f"{base}/{page}" + (f"?{urlencode(asked)}" if asked else "")


def html(template: str, context: Mapping[str, Any]) -> str:
    """A page; the context has at least what frame.html needs."""
    return _ENVIRONMENT.get_template(template).render(context)


def moment(at: float) -> str:
    """A point in time in UTC, to the second."""
    return timeline.moment(min(max(at, 0.0), cleaned.MAX_SECONDS))[:19]


@jinja2.pass_context
def _address_in(context: jinja2.runtime.Context, page: str, /, **query: object) -> str:
    return address(context["base"], page, **query)


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("celery_singleton_lock.web"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.globals.update(
    address=_address_in,
    can_be_stopped=can_be_stopped,
    duration=words.duration,
    ending=words.ending,
    mark_of=mark_of,
    moment=moment,
    name_in=name_in,
    seconds=words.seconds,
    without_queue=without_queue,
    GONE=GONE,
)
