"""Fenced writes to an S3 server: moto's, over HTTP, with boto3's own client.

Moto compares and writes in two steps, so that truly simultaneous requests would test moto. Instead, the other holder
writes between two requests of ours, in each place where it can.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from celery_singleton_lock import StaleFence
from celery_singleton_lock.contrib.fencing.s3 import ATTEMPTS, fenced_put_object
from tests.contrib.s3 import s3_client, s3_server

#: All on one server.
pytestmark = pytest.mark.xdist_group("s3")

#: Like real fences: microseconds since the epoch.
OLD, NEW = 1_795_000_000_000_001, 1_795_000_000_000_002

REPORT = {"Bucket": "reports", "Key": "tenant/7"}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def connect(server: str) -> Iterator[Callable[[], Any]]:
    """Make a client of a store with an empty bucket."""
    clients: list[Any] = []

    def make() -> Any:
        clients.append(s3_client(server))
        return clients[-1]

    make().create_bucket(Bucket=REPORT["Bucket"])
    yield make
    for found in clients[0].list_objects_v2(Bucket=REPORT["Bucket"]).get("Contents", []):
        clients[0].delete_object(Bucket=REPORT["Bucket"], Key=found["Key"])
    for client in clients:
        client.close()


@pytest.fixture
def client(connect: Callable[[], Any]) -> Any:
    return connect()


def before_the_write_of(client: Any, happens: Callable[[], Any], times: int = 1) -> None:
    """Let something happen between the look and the write of `fenced_put_object`."""
    left = iter(range(times))

    def before(**_: object) -> None:
        if next(left, None) is not None:
            happens()

    client.meta.events.register("before-call.s3.PutObject", before)


def body(client: Any) -> bytes:
    return client.get_object(**REPORT)["Body"].read()


def test_stale_holder_is_refused(client: Any) -> None:
    fenced_put_object(client, NEW, **REPORT, Body=b"new")
    with pytest.raises(StaleFence) as refused:
        fenced_put_object(client, OLD, **REPORT, Body=b"old")
    assert (refused.value.target, refused.value.fence, refused.value.seen) == ("s3://reports/tenant/7", OLD, NEW)
    assert body(client) == b"new"


def test_holder_may_write_often_and_the_next_one_after_it(client: Any) -> None:
    for fence, text in ((OLD, b"1"), (OLD, b"2"), (NEW, b"3")):
        fenced_put_object(client, fence, **REPORT, Body=text)
    assert body(client) == b"3"


def test_stale_holder_that_has_already_looked_is_refused(client: Any, connect: Callable[[], Any]) -> None:
    fenced_put_object(client, OLD, **REPORT, Body=b"old")
    before_the_write_of(client, lambda: fenced_put_object(connect(), NEW, **REPORT, Body=b"new"))
    with pytest.raises(StaleFence):
        fenced_put_object(client, OLD, **REPORT, Body=b"old again")
    assert body(client) == b"new"


def test_stale_holder_that_has_seen_no_object_is_refused(client: Any, connect: Callable[[], Any]) -> None:
    before_the_write_of(client, lambda: fenced_put_object(connect(), NEW, **REPORT, Body=b"new"))
    with pytest.raises(StaleFence):
        fenced_put_object(client, OLD, **REPORT, Body=b"old")
    assert body(client) == b"new"


def test_later_holder_writes_though_a_stale_one_was_faster(client: Any, connect: Callable[[], Any]) -> None:
    before_the_write_of(client, lambda: fenced_put_object(connect(), OLD, **REPORT, Body=b"old"))
    fenced_put_object(client, NEW, **REPORT, Body=b"new")
    assert body(client) == b"new"


def test_object_that_is_deleted_in_between_is_written(client: Any, connect: Callable[[], Any]) -> None:
    fenced_put_object(client, OLD, **REPORT, Body=b"old")
    before_the_write_of(client, lambda: connect().delete_object(**REPORT))
    fenced_put_object(client, NEW, **REPORT, Body=b"new")
    assert body(client) == b"new"


def test_write_to_an_object_that_keeps_changing_is_given_up(client: Any, connect: Callable[[], Any]) -> None:
    other, count = connect(), iter(range(1000))

    def disturb() -> None:
        other.put_object(**REPORT, Body=str(next(count)).encode())

    before_the_write_of(client, disturb, times=ATTEMPTS)
    with pytest.raises(ClientError, match="PreconditionFailed"):
        fenced_put_object(client, NEW, **REPORT, Body=b"new")
    assert next(count) == ATTEMPTS


def test_options_and_metadata_of_the_caller_are_kept(client: Any) -> None:
    fenced_put_object(client, NEW, **REPORT, Body=b"new", ContentType="text/csv", Metadata={"tenant": "7"})
    head = client.head_object(**REPORT)
    assert head["ContentType"] == "text/csv"
    assert head["Metadata"] == {"tenant": "7", "fence": str(NEW)}


def test_object_that_was_written_without_a_fence_is_taken_over(client: Any) -> None:
    client.put_object(**REPORT, Body=b"from before")
    fenced_put_object(client, OLD, **REPORT, Body=b"old")
    assert body(client) == b"old"


def test_foreign_fence_is_an_error(client: Any) -> None:
    client.put_object(**REPORT, Body=b"theirs", Metadata={"fence": "wooden"})
    with pytest.raises(ValueError, match="s3://reports/tenant/7 has 'fence' in its metadata, but 'wooden' is not"):
        fenced_put_object(client, NEW, **REPORT, Body=b"ours")
    assert client.get_object(**REPORT)["Body"].read() == b"theirs"


def test_other_refusals_of_the_store_are_raised(client: Any) -> None:
    with pytest.raises(ClientError, match="NoSuchBucket"):
        fenced_put_object(client, NEW, Bucket="nowhere", Key="a", Body=b"new")


def test_file_that_could_not_be_sent_again_is_refused(client: Any) -> None:
    with pytest.raises(TypeError, match="allowed: bytes"):
        fenced_put_object(client, NEW, **REPORT, Body=io.BytesIO(b"new"))


def test_execution_without_a_lock_is_refused(client: Any) -> None:
    with pytest.raises(StaleFence, match="no lock is held"):
        fenced_put_object(client, 0, **REPORT, Body=b"new")
