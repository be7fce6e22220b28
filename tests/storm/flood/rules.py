"""The rules of a flood: how long its locks last, and when its messages are acknowledged."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import ClassVar

from typing_extensions import Self

from celery_singleton_lock.options.rules import UNTIL_EXPIRED, WHILE_EXECUTING


@dataclass(frozen=True)
class Rules:
    """The judge reads them in the history, workers and senders in their environment.

    Attributes:
        queue_ttl: seconds for which a waiting message keeps others out; None for the default of one day.
        expired_ttl: the same under `until_expired`.
        ttl: seconds of a lease.
        is_late: whether messages are acknowledged after they have run.
    """

    VARIABLE: ClassVar[str] = "FLOOD_RULES"

    queue_ttl: float | None
    expired_ttl: float
    ttl: float
    is_late: bool

    def seconds_of(self, scope: str) -> float | None:
        return None if scope == WHILE_EXECUTING else self.expired_ttl if scope == UNTIL_EXPIRED else self.queue_ttl

    def environment(self) -> dict[str, str]:
        return {self.VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def of_environment(cls) -> Self:
        return cls(**json.loads(os.environ[cls.VARIABLE]))
