"""A call has one key where it is sent and where it runs: objects that a serializer turns into something else."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Any, NamedTuple
from uuid import UUID, uuid4

import pytest
from celery import Celery
from kombu.utils import json as kombu_json
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, RootModel

from celery_singleton_lock import InvalidKey, InvalidOption, SingletonTask
from tests.unit.keyed import lock_of, task_of
from tests.unit.test_keys_roundtrip import received


class Point(NamedTuple):
    x: int
    y: int


class Item(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    sku: str = Field(alias="stockKeepingUnit")
    count: int = 1


class Lines(RootModel[list[Item]]): ...


class Order(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    id: int = Field(alias="orderId")
    day: date = date(2026, 1, 1)
    price: Decimal = Decimal("1.50")
    note: str = Field(default="", validation_alias=AliasChoices("noteText", "note"), serialization_alias="noteText")
    items: list[Item] = []
    first: Item | None = None
    gift: Annotated[Item | None, "wrapped"] = None
    by_shelf: dict[str, Item] = {}
    lines: Lines = Lines([])
    number: UUID = Field(default_factory=uuid4)


class Shown:
    """kombu sends what it returns."""

    def __init__(self, id: int) -> None:
        self.id = id

    def __json__(self) -> dict[str, Any]:
        return {"id": self.id, "day": date(2026, 1, 1), "pair": (1, 2)}


class State(enum.Enum):
    OPEN = 1

    def __json__(self) -> str:
        return self.name.lower()


class ShownModel(BaseModel):
    id: int

    def __json__(self) -> dict[str, Any]:
        return {"id": self.id, "kind": "shown"}


@dataclasses.dataclass
class Parcel:
    id: int
    tags: frozenset[str] = frozenset()
    inner: tuple[int, int] = (1, 2)


class Registered(Parcel):
    """A type that a program has registered with kombu."""


def ship(order: Any, full: bool = False) -> None: ...


def key(value: Any, lock_key: Any = None, run: Callable[..., Any] = ship) -> str:
    return str(lock_of(task_of(run, lock_key), (value,), {}).key)


def _kind(value: object) -> str:
    return type(value).__name__


@contextmanager
def registered() -> Iterator[None]:
    kombu_json.register_type(Registered, "registered", lambda it: it.id, Registered)
    try:
        yield
    finally:
        kombu_json._encoders.pop(Registered)
        kombu_json._decoders.pop("registered")


#: Each way to choose by a part of the argument.
BY_ID = (["order.id"], ["order[id]"], "{order.id}", "{order[id]}", "{order.id!r:>3}")

ORDER = Order(id=7, items=[Item(sku="a")], first=Item(sku="b"), by_shelf={"x": Item(sku="c")}, number=UUID(int=1))


@pytest.fixture
def app() -> Celery:
    return Celery("shop", broker="memory://", set_as_current=False)


class TestBothEnds:
    @pytest.mark.parametrize("lock_key", [None, ["order"], "{order}", *BY_ID, lambda call: call["order"]])
    @pytest.mark.parametrize("value", [Shown(7), ShownModel(id=7), {"id": 7}], ids=_kind)
    def test_an_object_and_its_form_in_the_message_have_one_key(self, value: Any, lock_key: Any) -> None:
        assert key(value, lock_key) == key(received(value, "json"), lock_key)

    @pytest.mark.parametrize("lock_key", [None, ["order"], "{order}", *BY_ID])
    @pytest.mark.parametrize("value", [Parcel(7), Parcel(7, frozenset({"a", "b"})), ShownModel(id=7)], ids=_kind)
    def test_what_was_pickled_has_the_key_of_the_callers_object(self, value: Any, lock_key: Any) -> None:
        assert key(value, lock_key) == key(received(value, "pickle"), lock_key)
        assert key(value, lock_key) != key(type(value)(id=8), lock_key)

    @pytest.mark.parametrize("value", [State.OPEN, [State.OPEN], {"state": State.OPEN}, Shown(1)], ids=_kind)
    def test_callable_gets_the_same_at_both_ends(self, value: Any) -> None:
        seen: list[Any] = []
        for each in (value, received(value, "json")):
            key(each, lambda call: seen.append(call["order"]))
        assert seen[0] == seen[1]
        assert type(seen[0]) is type(seen[1])

    def test_callable_gets_plain_values_and_dates(self) -> None:
        seen: list[Any] = []
        key((Point(1, 2), {1: datetime(2026, 1, 1)}, b"x"), lambda call: seen.append(call))
        assert seen == [{"order": [[1, 2], {"1": datetime(2026, 1, 1)}, b"x"], "full": False}]

    def test_registered_type_has_one_key(self) -> None:
        with registered():
            value = Registered(7)
            assert key(value) == key(received(value, "json"))
            assert key(value, ["order.id"]) == key(received(value, "json"), ["order.id"]) != key(value)

    def test_item_of_a_list_and_attribute_of_a_date_are_found(self) -> None:
        assert key([{"id": 1}, {"id": 2}], ["order[1].id"]) == key(({}, {"id": 2}), ["order[1].id"])
        assert key(date(2026, 1, 2), "{order.year}") == key(date(2026, 3, 4), "{order.year}")


class TestModels:
    """pydantic's models: of one argument, of several kinds of hints, and in every form in which they can be sent."""

    @pytest.fixture
    def forms(self) -> list[Any]:
        forms: list[Any] = [ORDER]
        for mode in ("json", "python"):
            forms += [ORDER.model_dump(mode=mode, **how) for how in ({}, {"by_alias": True}, {"exclude_unset": True})]
            forms += [
                ORDER.model_dump(mode=mode, exclude_defaults=True),
                ORDER.model_dump(mode=mode, exclude_none=True),
            ]
            forms += [ORDER.model_dump(mode=mode, by_alias=True, exclude_unset=True)]
        return forms

    @pytest.mark.parametrize("lock_key", [None, ["order"], "{order}", *BY_ID, lambda call: call["order"]["id"]])
    def test_equal_models_have_one_key_however_they_were_sent(
        self, app: Celery, forms: list[Any], lock_key: Any
    ) -> None:
        @app.task(base=SingletonTask, pydantic=True, lock_key=lock_key, name="shop.ship")
        def ship(order: Order) -> None: ...

        made = {ship.lock_key_of(form) for form in forms}
        made |= {ship.lock_key_of(order=received(form, "json")) for form in forms[1:]}
        assert len(made) == 1
        assert made != {ship.lock_key_of(ORDER.model_copy(update={"id": 8}))}

    @pytest.mark.parametrize("path", ["order.items[0].sku", "order.first.count", "order.by_shelf.x.sku", "order.day"])
    def test_parts_of_a_model_are_found_by_their_names(self, app: Celery, forms: list[Any], path: str) -> None:
        @app.task(base=SingletonTask, pydantic=True, lock_key=[path], name="shop.ship")
        def ship(order: Order | None = None) -> None: ...

        assert len({ship.lock_key_of(form) for form in forms}) == 1

    def test_default_that_a_function_makes_is_not_made_for_a_key(self, app: Celery) -> None:
        @app.task(base=SingletonTask, pydantic=True, name="shop.ship")
        def ship(order: Order) -> None: ...

        assert ship.lock_key_of({"id": 7}) == ship.lock_key_of({"orderId": 7})
        assert ship.lock_key_of({"id": 7}) != ship.lock_key_of({"id": 7, "number": str(uuid4())})

    def test_message_that_the_model_refuses_has_a_key(self, app: Celery) -> None:
        @app.task(base=SingletonTask, pydantic=True, name="shop.ship")
        def ship(order: Order) -> None: ...

        assert ship.lock_key_of({"id": "x"}) != ship.lock_key_of({"id": 7})
        assert ship.lock_key_of(["nonsense"]) != ship.lock_key_of(None)

    def test_alias_never_hides_another_field(self) -> None:
        def run(order: Order) -> None: ...

        assert key({"id": 1, "orderId": 2}, run=run) != key({"id": 1}, run=run) != key({"id": 2}, run=run)

    def test_hints_that_cannot_be_evaluated_do_no_harm(self) -> None:
        def run(order: Nowhere, full: bool = False) -> None: ...  # type: ignore[name-defined] # noqa: F821

        assert key({"id": 7}, run=run) == key({"id": 7})

    def test_model_that_is_defined_after_the_task_is_found(self, app: Celery) -> None:
        @app.task(base=SingletonTask, lock_key=["order"], name="shop.ship")
        def ship(order: LaterOrder) -> None: ...  # type: ignore[name-defined] # noqa: F821

        before = ship.lock_key_of({"id": 7, "day": "2026-01-01"})
        globals()["LaterOrder"] = Order
        try:
            assert ship.lock_key_of({"orderId": 7}) == ship.lock_key_of({"id": 7}) != before
        finally:
            del globals()["LaterOrder"]


class TestErrors:
    @pytest.mark.parametrize(
        ("value", "lock_key", "words"),
        [
            ({"no": 7, "day": 1}, ["order.id"], r"argument order of TestErrors\.ship has no 'id'; it has: no, day$"),
            ({"a": {}}, "{order.a.id}", r"argument order\.a of TestErrors\.ship has no 'id'; it is an empty dict$"),
            ([1, 2], ["order[2]"], r"argument order of TestErrors\.ship has no '2'; it is a list$"),
            ("x", ["order.id"], r"argument order of TestErrors\.ship has no 'id'; it is a str$"),
            (None, "{order.id}", r"argument order of TestErrors\.ship has no 'id'; it is a NoneType$"),
            (Parcel(1), ["order.no"], r"has no 'no'; it has: id, tags, inner$"),
        ],
    )
    def test_path_that_leads_nowhere_is_a_clear_error(self, value: Any, lock_key: Any, words: str) -> None:
        with pytest.raises(InvalidKey, match=words) as caught:
            key(value, lock_key, run=TestErrors.ship)
        assert repr(lock_key) in str(caught.value)

    @staticmethod
    def ship(order: Any) -> None: ...

    def test_failing_callable_hears_what_it_gets(self) -> None:
        with pytest.raises(InvalidKey, match="a message carries them: order with id, day, pair, full, a bool"):
            key(Shown(1), lambda call: call["order"].id)

    @pytest.mark.parametrize("lock_key", [["order."], ["order..id"], [""], ["order[id"], "{order.}"])
    def test_text_that_is_no_path_is_refused(self, lock_key: Any) -> None:
        with pytest.raises(InvalidOption, match="path into one"):
            task_of(ship, lock_key)

    def test_error_names_the_function(self) -> None:
        with pytest.raises(InvalidOption, match=r"but ship has no argument 'ordr'; it has: order, full"):
            task_of(ship, ["ordr.id"])
