"""Fenced writes to Redis, or a Redis Cluster: any command that writes one key, and the fence beside it, in one script.

The fence of `key` is at `{key}:fence`, in the same slot of a cluster. It is kept for as long as the data, and
`FENCE_TTL` longer when the data has a time to live or is deleted.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

from celery_singleton_lock.contrib.fencing import check_fence
from celery_singleton_lock.errors import StaleFence

#: Seconds for which a fence outlives its data: a holder that was paused for longer is no longer noticed.
FENCE_TTL = 86_400.0

_SCRIPT = files(__package__).joinpath("fenced.lua").read_text()

#: The part that Redis Cluster hashes instead of the whole key.
_TAG = re.compile(r"[^{]*\{[^}]+\}")


def fenced_command(client: Any, fence: int, command: str, key: str, *arguments: Any) -> Any:
    """Run a command that writes one key, `SET`, `HSET`, `DEL`, …, unless a later holder has written it.

    Args:
        client: a `redis.Redis` or `redis.RedisCluster`.
        fence: the fencing token of the lock, `self.lock.fence` in a task.
        command: the command's name.
        key: the key that it writes.
        arguments: the command's arguments after the key.

    Returns:
        The server's answer; redis-py does not convert it.

    Raises:
        StaleFence: a later holder has written; nothing was done.
        ValueError: no fence can be in the key's slot of a cluster.
    """
    check_fence(key, fence)
    # The server keeps a copy of the script; only the first call sends it.
    script = client.register_script(_SCRIPT)
    done, answer = script([key, fence_key(key)], [fence, round(FENCE_TTL * 1000), command, *arguments])
    if not done:
        raise StaleFence(key, fence, int(answer))
    return answer


def fence_key(key: str) -> str:
    """The key of a key's fence; in the same slot of a cluster.

    Raises:
        ValueError: there is no such key.
    """
    if _TAG.match(key):
        return f"{key}:fence"
    if "}" in key:
        raise ValueError(f"key {key!r} has a brace; allowed: keys without '}}', or with a hash tag such as '{{a}}:b'")
    return f"{{{key}}}:fence"
