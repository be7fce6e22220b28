"""Fenced writes of objects in S3, or in a store with S3's conditional writes (`If-Match`, `If-None-Match`).

The fence is in the object's metadata. An object is replaced only if it is still the one whose fence was compared;
otherwise the comparison starts over.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from celery_singleton_lock.contrib.fencing import check_fence
from celery_singleton_lock.errors import StaleFence

try:
    from botocore.exceptions import ClientError
except ImportError as error:
    raise ImportError(
        "fencing with S3 needs boto3 1.35.70 or newer: pip install 'celery-singleton-lock[fencing-s3]'"
    ) from error

#: The name of the fence in an object's metadata.
METADATA = "fence"

#: How often to try again because somebody else wrote between the comparison and the write: holders are few, and each
#: writes rarely.
ATTEMPTS = 20

_NOT_FOUND, _CONFLICT, _PRECONDITION_FAILED = 404, 409, 412


def fenced_put_object(client: Any, fence: int, *, Bucket: str, Key: str, Body: bytes, **options: Any) -> Any:
    """Like `client.put_object`, unless a later holder has written the object.

    It takes two requests. The caller needs the right to read the object (`s3:GetObject`), and to learn that it does not
    exist yet (`s3:ListBucket`).

    Args:
        client: boto3's S3 client.
        fence: the fencing token of the lock, `self.lock.fence` in a task.
        Bucket: as for `put_object`.
        Key: as for `put_object`.
        Body: the content; bytes, not a file, because it may have to be sent again.
        options: as for `put_object`: `ContentType`, `Metadata`, ….

    Returns:
        What `put_object` returns.

    Raises:
        StaleFence: a later holder has written.
        TypeError: the content is not bytes.
        ValueError: the object's fence was not written by this function; nothing was done.
        botocore.exceptions.ClientError: the store refuses for another reason.
    """
    target = f"s3://{Bucket}/{Key}"
    check_fence(target, fence)
    if not isinstance(Body, bytes):
        raise TypeError(f"Body of {target} is a {type(Body).__name__}; allowed: bytes (file.read())")
    metadata = {**options.pop("Metadata", {}), METADATA: str(fence)}
    for attempt in count(1):
        seen, condition = _look(client, Bucket, Key)
        if seen > fence:
            raise StaleFence(target, fence, seen)
        try:
            return client.put_object(Bucket=Bucket, Key=Key, Body=Body, Metadata=metadata, **condition, **options)
        except ClientError as refused:
            # Not found: the object was deleted after the comparison.
            if attempt == ATTEMPTS or _status(refused) not in (_NOT_FOUND, _CONFLICT, _PRECONDITION_FAILED):
                raise


def _look(client: Any, bucket: str, key: str) -> tuple[int, dict[str, str]]:
    """The fence of the object, 0 for none, and the condition that the object has not changed since."""
    try:
        head = client.head_object(Bucket=bucket, Key=key)
    except ClientError as error:
        if _status(error) != _NOT_FOUND:
            raise
        return 0, {"IfNoneMatch": "*"}
    text = head["Metadata"].get(METADATA, "0")
    if not text.isdecimal():
        raise ValueError(f"s3://{bucket}/{key} has {METADATA!r} in its metadata, but {text!r} is not a fencing token")
    return int(text), {"IfMatch": head["ETag"]}


def _status(error: Any) -> int:
    return int(error.response["ResponseMetadata"]["HTTPStatusCode"])
