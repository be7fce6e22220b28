"""A page's address with its query, and the page as HTML; every value from elsewhere is checked or escaped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import jinja2

from celery_singleton_lock import cleaned, journal_entry
from celery_singleton_lock.diagnosis.held import GONE
from celery_singleton_lock.journal import timeline
from celery_singleton_lock.keys.key import name_in, without_queue
from celery_singleton_lock.web.actions import can_be_stopped, mark_of

#: Ways to sort the locks; the first is the default.
SORTS = ("name", "longest held", "most waiters")

#: The minutes of a timeline: the most, and the default.
MOST_MINUTES, MINUTES = 24 * 60.0, 10.0

#: The highest page number.
MOST_PAGES = 100_000


@dataclass(frozen=True, slots=True)
class Asked:
    """The values of a query; compare the fields of the forms.

    Attributes:
        search: the text to look for.
        key: the key of a lock.
        sort: one of `SORTS`.
        number: the number of the page, from 1.
        minutes: the length of the timeline.
    """

    search: str = ""
    key: str = ""
    sort: str = SORTS[0]
    number: int = 1
    minutes: float = MINUTES

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Asked:
        """The values of a query, ignoring those that make no sense."""
        sort = query.get("sort", "")
        return cls(
            search=cleaned.text(query.get("q", "").strip()),
            key=cleaned.key(query.get("key", "").strip()),
            sort=sort if sort in SORTS else SORTS[0],
            number=round(_number(query.get("page", ""), 1, 1, MOST_PAGES)),
            minutes=_number(query.get("minutes", ""), MINUTES, 1, MOST_MINUTES),
        )

    def query(self, **changed: object) -> dict[str, object]:
        """The query for an address, without defaults."""
        found = {
            "q": self.search,
            "key": self.key,
            "sort": "" if self.sort == SORTS[0] else self.sort,
            "page": None if self.number == 1 else self.number,
            "minutes": None if self.minutes == MINUTES else f"{self.minutes:g}",
            **changed,
        }
        return {name: value for name, value in found.items() if value}


def _number(text: str, default: float, least: float, most: float) -> float:
    try:
        found = float(text)
    except ValueError:
        return default
    return min(max(found, least), most) if math.isfinite(found) else default


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
    duration=journal_entry.duration,
    ending=journal_entry.ending,
    mark_of=mark_of,
    moment=moment,
    name_in=name_in,
    seconds=journal_entry.seconds,
    without_queue=without_queue,
    GONE=GONE,
)
