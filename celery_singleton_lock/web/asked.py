"""The query of a page's address, after the question mark, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from celery_singleton_lock import cleaned

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
        name: the name of a task, or of a lock.
        id: the id of a task's message.
        sort: one of `SORTS`.
        number: the number of the page, from 1.
        minutes: the length of the timeline.
    """

    search: str = ""
    key: str = ""
    name: str = ""
    id: str = ""
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
            name=cleaned.text(query.get("name", "").strip()),
            id=cleaned.text(query.get("id", "").strip()),
            sort=sort if sort in SORTS else SORTS[0],
            number=round(_number(query.get("page", ""), 1, 1, MOST_PAGES)),
            minutes=_number(query.get("minutes", ""), MINUTES, 1, MOST_MINUTES),
        )

    def query(self, **changed: object) -> dict[str, object]:
        """The query for an address, without defaults."""
        found = {
            "q": self.search,
            "key": self.key,
            "name": self.name,
            "id": self.id,
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
