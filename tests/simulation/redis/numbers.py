"""Numbers as Redis reads and writes them."""

from __future__ import annotations

import re

from tests.simulation.redis.replies import CommandError

_INTEGER = re.compile(rb"-?[1-9][0-9]{0,18}|0")
_FLOAT = re.compile(
    rb"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)"
    rb"(?:[pP][+-]?[0-9]+)?|inf(?:inity)?)",
    re.IGNORECASE,
)
ZERO = ord("0")
LEAST, MOST = -(2**63), 2**63 - 1

NOT_AN_INTEGER = "ERR value is not an integer or out of range"
NOT_A_FLOAT = "ERR value is not a valid float"


def integer(text: bytes, error: str = NOT_AN_INTEGER) -> int:
    if len(text) < 19 and text.isdigit() and text[0] != ZERO:
        return int(text)  # The usual case.
    if _INTEGER.fullmatch(text) and LEAST <= (number := int(text)) <= MOST:
        return number
    raise CommandError(error)


def floating(text: bytes, error: str = NOT_A_FLOAT) -> float:
    if not _FLOAT.fullmatch(text):
        raise CommandError(error)
    return float.fromhex(text.decode()) if b"x" in text.lower() else float(text)


class Bound:
    """An end of a range of scores: `5`, `(5`, `-inf`."""

    def __init__(self, text: bytes) -> None:
        self.is_exclusive = text[:1] == b"("
        # Here, an empty text is 0.
        self.score = floating(text[self.is_exclusive :] or b"0", "ERR min or max is not a float")

    def is_below(self, score: float) -> bool:
        """As the lower end of the range."""
        return self.score < score if self.is_exclusive else self.score <= score

    def is_above(self, score: float) -> bool:
        """As the upper end of the range."""
        return score < self.score if self.is_exclusive else score <= self.score
