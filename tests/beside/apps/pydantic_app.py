"""Exclusive tasks with `pydantic=True`, and a program that sends models to them in one form or another."""

from __future__ import annotations

import json
import os
import sys
from datetime import date
from typing import Any
from uuid import UUID, uuid4

from celery import Celery
from pydantic import BaseModel, ConfigDict, Field

import tests.integration.ready  # noqa: F401
from celery_singleton_lock import DuplicateResult, SingletonTask, clock
from tests.recording import may_end, run

app = Celery("shop", set_as_current=False)
app.conf.update(json.loads(os.environ["TEST_CONF"]))


class Item(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    sku: str = Field(alias="stockKeepingUnit")


class Order(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    id: int = Field(alias="orderId")
    day: date = date(2026, 1, 1)
    items: list[Item] = []
    number: UUID = Field(default_factory=uuid4)


class Tagged:
    """kombu sends what its `__json__` returns."""

    def __init__(self, tag: str) -> None:
        self.tag = tag

    def __json__(self) -> dict[str, str]:
        return {"tag": self.tag}


def _work(self: Any, order: Order) -> None:
    assert isinstance(order, Order), "the body gets a model, whatever the key was made from"
    with run(f"order {order.id}", self.request.id):
        while not may_end(f"order {order.id}"):
            clock.sleep(0.01)


def _make(name: str, **options: Any) -> Any:
    return app.task(
        base=SingletonTask, bind=True, pydantic=True, name=f"shop.{name}", on_conflict="raise", lock_ttl=2, **options
    )(_work)


ship_all = _make("all", lock_scope="until_and_while_executing")
ship_path = _make("path", lock_key=["order.id"])
ship_template = _make("template", lock_key="{order.id}", lock_scope="until_executed")
ship_callable = _make("callable", lock_key=lambda call: call["order"]["id"], lock_scope="until_executed")
ship_wrong = _make("wrong", lock_key=["order.idd"])


@app.task(base=SingletonTask, name="shop.tag", bind=True, lock_key=["tagged.tag"], on_conflict="raise", lock_ttl=2)
def tag(self: Any, tagged: Any) -> None:
    with run("tag", self.request.id):
        while not may_end("tag"):
            clock.sleep(0.01)


@app.task(base=SingletonTask, name="shop.tag_queued", bind=True, lock_scope="until_executed", lock_ttl=2)
def tag_queued(self: Any, tagged: Any) -> None:
    with run("tag", self.request.id):
        while not may_end("tag"):
            clock.sleep(0.01)


#: The same order in every form in which a program may send it.
FORMS = {
    "model": lambda it: it,
    "json": lambda it: it.model_dump(mode="json"),
    "python": lambda it: it.model_dump(),
    "by_alias": lambda it: it.model_dump(mode="json", by_alias=True),
    "exclude_unset": lambda it: it.model_dump(mode="json", by_alias=True, exclude_unset=True),
}


def value_of(form: str, number: int) -> Any:
    if form == "tagged":
        return Tagged(str(number))
    if form == "dict":
        return {"tag": str(number)}
    return FORMS[form](Order(id=number, items=[Item(sku="a")], number=UUID(int=number)))


def main(name: str, number: str, *forms: str) -> None:
    """Send an order in these forms, one after the other, and print what each call was answered, and its key."""
    task = app.tasks[f"shop.{name}"]
    for form in forms:
        value = value_of(form, int(number))
        sent = task.delay(value)
        answer = {"id": sent.id, "was_sent": not isinstance(sent, DuplicateResult), "key": task.lock_key_of(value)}
        print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
