"""The key of a lock: a prefix, the version of the key format, the lock's name, and a digest of what makes two calls the
same. It is short enough for a log, and equal in the program that sends and in the worker that receives. Its label says
in a few words what the digest was made from.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import islice

from celery_singleton_lock import cleaned
from celery_singleton_lock.keys.encoding import digest, encode
from celery_singleton_lock.keys.template import SCALARS

#: The version of the key format, part of every key. Raise it with each change of the format, so that two formats never
#: meet in one lock.
VERSION = 1

#: The suffix that turns the key of a lock into the key of the message that waits for it.
QUEUE = ":queue"

_AFTER_PREFIX = re.compile(rf":[0-9]+:\{{[^{{}}]+:[0-9a-f]{{32}}\}}({QUEUE})?")

#: How many characters of a lock's name its key shows; the digest covers the whole name.
MAX_SHOWN = 100

#: The largest number of characters in a label.
MAX_LABEL = 60

#: Integers up to this are shown in full.
_WHOLE = 10**MAX_LABEL


def key_of(prefix: str, lock_name: str, content: bytes) -> str:
    """The key of a lock. A store appends `:run` and the like. The braces are Redis Cluster's hash tag."""
    beginning, name = _of_name(prefix, lock_name)
    return f"{beginning}{digest(name + content)}}}"


def key_of_text(prefix: str, lock_name: str, text: str) -> str:
    """The key of a call whose caller chose the text for the key."""
    return key_of(prefix, lock_name, encode(text))


def key_of_queue(key: str) -> str:
    """The key that a message holds while it waits for the lock `key`: another lock, in the same slot of a cluster."""
    return f"{key}{QUEUE}"


def is_of_queue(key: str) -> bool:
    """Whether this is the key of a message that waits."""
    return key.endswith(QUEUE)


def without_queue(key: str) -> str:
    """The key of the lock that a message waits for; any other key is returned as it is."""
    return key.removesuffix(QUEUE)


def name_of_beat(name: str) -> str:
    """The name of the locks by which the beats of a schedule are seen."""
    return f"beat:{name}"


def key_of_beat(prefix: str, name: str) -> str:
    """The key beside which the record of what beat has sent is stored."""
    return key_of(prefix, name_of_beat(name), b"")


def name_in(key: str) -> str:
    """The lock's name as far as a key shows it; the key itself if it was not made here."""
    return key.partition("{")[2].rpartition("}")[0].rpartition(":")[0] or key


def shown_name(lock_name: str) -> str:
    """A lock's name as its key shows it."""
    shown = "".join("_" if char in "{}" or char.isspace() or not char.isprintable() else char for char in lock_name)
    return shown[:MAX_SHOWN]


def is_key(prefix: str, text: str) -> bool:
    """Whether the text has the form of a key for locks with this prefix."""
    return text.startswith(f"{prefix}:") and _AFTER_PREFIX.fullmatch(text, len(prefix)) is not None


def has_form_of_key(text: str) -> bool:
    """Whether the text has the form of a key with any prefix."""
    return is_key(text.rpartition(":{")[0].rpartition(":")[0], text)


@lru_cache(maxsize=1000)
def _of_name(prefix: str, lock_name: str) -> tuple[str, bytes]:
    """The beginning of all keys of one name, and the name as it goes into the digest."""
    return f"{prefix}:{VERSION}:{{{shown_name(lock_name)}:", encode(lock_name)


def label_of_arguments(arguments: Mapping[str, object]) -> str:
    """Arguments by name: `tenant_id=7, kind='full'`."""
    # No label has room for more.
    shown = [f"{name}={_in_short(value)}" for name, value in islice(arguments.items(), MAX_LABEL // 4)]
    return label_of_text(", ".join(shown))


def label_of_value(value: object) -> str:
    """The value that a callable returned."""
    return label_of_text(value if isinstance(value, str) else _in_short(value))


def label_of_text(text: str) -> str:
    """A text as it is, printable, cut to `MAX_LABEL` characters."""
    if len(text) <= MAX_LABEL and text.isprintable():
        return str(text)
    shown = cleaned.printable(text[: MAX_LABEL + 1])
    return shown if len(shown) <= MAX_LABEL else shown[: MAX_LABEL - 1] + "\u2026"


def _in_short(value: object) -> str:
    if type(value) is int and -_WHOLE < value < _WHOLE:  # The most common case.
        return str(value)
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, str):
        return repr(value[: MAX_LABEL + 1])
    if isinstance(value, SCALARS):
        return cleaned.value_shown(value) if isinstance(value, int) and not isinstance(value, bool) else str(value)
    # For any other object, only the type is short and quick to write.
    return f"<{type(value).__name__}>"
