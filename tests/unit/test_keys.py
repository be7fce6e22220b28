from __future__ import annotations

import enum
import gc
import inspect
import subprocess
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from celery_singleton_lock import InvalidKey, InvalidOption, SingletonTask
from tests.unit.keyed import lock_of, seen_by_lock_key, task_of


def f(a: Any, b: Any = 2, *, c: Any = None) -> None: ...


def g(*args: Any, **kwargs: Any) -> None: ...


#: Signatures with each kind of argument.
SIGNATURES: list[Any] = [
    lambda: None,
    lambda a: None,
    lambda a, b=2: None,
    lambda a=1, b=2, c=3: None,
    lambda a, /, b=2: None,
    lambda a, *b: None,
    lambda a, *, b=2: None,
    lambda a, **b: None,
    f,
    g,
]


def _listed(value: Any) -> Any:
    return [*value] if isinstance(value, tuple) else value


class Colour(str, enum.Enum):
    RED = "red"


class Number(enum.IntEnum):
    ONE = 1


class Plain(enum.Enum):
    ONE = 1
    TWO = 2


class Access(enum.Flag):
    READ = 1
    WRITE = 2
    RUN = 4


class Model(BaseModel):
    x: int


class Point(NamedTuple):
    x: int
    y: int


def key(*args: Any, lock_key: Any = None, run: Callable[..., Any] = f, name: str = "task", **kwargs: Any) -> str:
    return str(lock_of(task_of(run, lock_key, lock_name=name), args, kwargs).key)


def key_of_text(text: str) -> str:
    """The key of a call whose caller chose the text."""
    return str(lock_of(task_of(f), (1,), {}, chosen=text).key)


class TestEqualCalls:
    def test_position_keyword_and_default_are_one_call(self) -> None:
        assert key(1) == key(1, 2) == key(1, b=2) == key(a=1, b=2) == key(b=2, a=1, c=None)

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ((1, 2), [1, 2]),
            (Point(1, 2), [1, 2]),
            ({"x": 1, "y": 2}, OrderedDict(y=2, x=1)),
            ({1: "a"}, {"1": "a"}),
            ({True: "a", None: "b", 1.5: "c"}, {"true": "a", "null": "b", "1.5": "c"}),
            ({1, 2, 3}, {3, 2, 1}),
            ({1, 2}, frozenset({2, 1})),
            (Colour.RED, "red"),
            (Number.ONE, 1),
            (Model(x=1), {"x": 1}),
            (float("nan"), float("nan")),
        ],
    )
    def test_values_that_a_message_makes_equal_have_one_key(self, one: Any, other: Any) -> None:
        assert key(one) == key(other)

    def test_bound_method_and_function_are_cached_separately(self) -> None:
        class Job(SingletonTask):
            name = lock_name = "task"

            def run(self, a: int) -> None: ...

        app = Celery("keys", set_as_current=False, broker="memory://")
        app.conf.singleton_lock_prefix = "p"
        job = app.register_task(Job())
        assert lock_of(job, (1,), {}).key == lock_of(job, (), {"a": 1}).key == key(1, run=lambda a: None)
        assert seen_by_lock_key(Job.run, (1, 2), {}) == {"self": 1, "a": 2}

    @given(
        run=st.sampled_from(SIGNATURES),
        args=st.lists(st.integers(), max_size=4),
        kwargs=st.dictionaries(st.sampled_from("abcd"), st.integers(), max_size=4),
    )
    def test_arguments_are_bound_as_python_binds_them(self, run: Any, args: list[int], kwargs: dict[str, int]) -> None:
        signature = inspect.signature(run)
        try:
            expected = signature.bind(*args, **kwargs)
        except TypeError:
            assert seen_by_lock_key(run, args, kwargs) is None
        else:
            expected.apply_defaults()
            bound = seen_by_lock_key(run, args, kwargs)
            assert bound is not None
            # In a message, a tuple is a list.
            assert [*bound.items()] == [(name, _listed(value)) for name, value in expected.arguments.items()]

    @pytest.mark.parametrize(("args", "kwargs"), [(None, {}), (7, {}), ([], 7), ([], {1: 2})])
    def test_nonsense_does_not_fit(self, args: Any, kwargs: Any) -> None:
        assert seen_by_lock_key(lambda a, b=2: None, args, kwargs) is None

    def test_remembered_signatures_do_not_keep_tasks_alive(self) -> None:
        def run(a: int) -> None: ...

        gone = weakref.ref(run)
        key(1, run=run)
        del run
        gc.collect()
        assert gone() is None


class TestDifferentCalls:
    def test_values_of_different_types_differ(self) -> None:
        values = [1, "1", 1.0, True, Decimal(1), "True", None, "None", 0, False, "", [], {}, set(), b"1", [1], {"1": 1}]
        assert len({key(value) for value in values}) == len(values)

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (["a", "b"], ["a,b"]),
            (["ab", "c"], ["a", "bc"]),
            ([[1], 2], [[1, 2]]),
            ([[], []], [[[]]]),
            ({"a": {"b": 1}}, {"a": {}, "b": 1}),
            ({"a": "b;s1:c"}, {"a": "b", "c": ""}),
            ("s1:a", "a"),
            (Plain.ONE, Plain.TWO),
            (datetime(2026, 1, 1), datetime(2026, 1, 1, tzinfo=timezone.utc)),
            (datetime(2026, 1, 1), date(2026, 1, 1)),
            (UUID(int=1), str(UUID(int=1))),
            (b"a", "a"),
            (-1, 1),
        ],
    )
    def test_contents_cannot_imitate_structure(self, one: Any, other: Any) -> None:
        assert key(one) != key(other)

    def test_combinations_of_flags_differ(self) -> None:
        """Up to Python 3.10 they have no name."""
        assert key(Access.READ | Access.WRITE) == key(Access.WRITE | Access.READ)
        assert len({key(Access(value)) for value in range(8)}) == 8

    def test_integers_too_long_for_python_to_print_differ(self) -> None:
        assert key(10**5000) != key(10**5000 + 1)

    def test_names_of_tasks_and_locks_make_different_keys(self) -> None:
        assert key(1, name="one") != key(1, name="other")
        assert key(1, name="a{b") != key(1, name="a}b"), "they look the same, but differ"

    def test_everything_that_celery_can_send_has_a_key(self) -> None:
        for value in (
            datetime.now(),
            date.today(),
            time(1, 2),
            Decimal("1.50"),
            UUID(int=3),
            b"\xff",
            2**70,
            "ä\ud800",
        ):
            assert key(value)


class TestShape:
    def test_key_is_short_and_has_one_hash_tag(self) -> None:
        made = key("x" * 10_000)
        assert made.startswith("p:1:{task:")
        assert made.endswith("}")
        assert made.count("{") == made.count("}") == 1
        assert len(made) < 60

    def test_odd_names_make_clean_keys(self) -> None:
        made = key(1, name="a {b}\n" + "x" * 300)
        assert made.count("{") == made.count("}") == 1
        assert made.isprintable()
        assert " " not in made
        assert len(made) < 160

    @pytest.mark.parametrize("seed", ["0", "1", "4711"])
    def test_key_is_the_same_in_every_process(self, seed: str) -> None:
        program = (
            "from tests.unit.keyed import lock_of, task_of\n"
            "def f(a, b=2): ...\n"
            "call = {'x', 'y', 'z', 1}, {'k': {'p': 1, 'q': frozenset('abc')}}\n"
            "print(lock_of(task_of(f), call, {}).key)"
        )
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        )

        def f(a: Any, b: Any = 2) -> None: ...

        assert done.stdout.strip() == key({1, "z", "y", "x"}, {"k": {"q": frozenset("cba"), "p": 1}}, run=f)


class TestNoStableForm:
    @pytest.mark.parametrize("value", [object(), lambda: 0, iter([]), timedelta, Exception()])
    def test_argument_without_a_stable_form_is_a_clear_error(self, value: object) -> None:
        with pytest.raises(InvalidKey) as caught:
            key(1, {"deep": [0, value]})
        text = str(caught.value)
        assert "argument b['deep'][1]" in text
        assert type(value).__name__ in text
        assert "task task" in text
        assert "lock_key" in text

    def test_structure_that_contains_itself_is_a_clear_error(self) -> None:
        loop: list[Any] = []
        loop.append(loop)
        with pytest.raises(InvalidKey, match="contains itself"):
            key(loop)

    def test_argument_that_is_not_part_of_the_key_may_be_anything(self) -> None:
        assert key(1, object(), lock_key=["a"]) == key(1, 5, lock_key=["a"])


class TestNames:
    def test_only_chosen_arguments_count(self) -> None:
        assert key(1, 5, lock_key=["a"]) == key(1, 6, c=7, lock_key=("a",))
        assert key(1, 5, lock_key=["a"]) != key(2, 5, lock_key=["a"])

    def test_default_of_a_chosen_argument_counts(self) -> None:
        assert key(1, lock_key=["b"]) == key(9, 2, lock_key=["b"])

    def test_empty_list_makes_one_key_for_the_task(self) -> None:
        assert key(1, lock_key=[]) == key(2, 3, lock_key=[])

    def test_chosen_argument_is_found_in_star_kwargs(self) -> None:
        assert key(1, t=1, u=2, lock_key=["t"], run=g) == key(2, t=1, lock_key=["t"], run=g)
        assert key(t=1, lock_key=["t"], run=g) != key(lock_key=["t"], run=g)

    def test_call_that_does_not_fit_also_has_a_key(self) -> None:
        assert key(1, 2, 3, 4) == key(1, 2, 3, 4)
        assert key(1, 2, 3, 4) != key(1, 2, 3, 5)


class TestTemplate:
    def test_template_and_text_of_a_caller_make_the_same_key(self) -> None:
        assert key(7, lock_key="tenant:{a}") == key_of_text("tenant:7")

    def test_names_of_arguments_do_not_matter_between_tasks(self) -> None:
        def other(tenant: int) -> None: ...

        assert key(7, lock_key="tenant:{a}") == key(7, lock_key="tenant:{tenant}", run=other)

    def test_values_cannot_forge_separators(self) -> None:
        assert key("x:y", "z", lock_key="{a}:{b}") != key("x", "y:z", lock_key="{a}:{b}")
        assert key("%3A;", lock_key="{a}:") != key(":", lock_key="{a}:")

    @pytest.mark.parametrize("template", ["{a[id]}", "{a[id]!r}", "{a[id]:>5}"])
    def test_template_may_use_parts_of_arguments(self, template: str) -> None:
        assert key({"id": 1, "x": 2}, lock_key=template) == key({"id": 1}, lock_key=template)
        assert key({"id": 1}, lock_key=template) != key({"id": 2}, lock_key=template)

    def test_template_may_format_a_date(self) -> None:
        of = "{a:%Y-%m}"
        assert key(date(2026, 1, 2), lock_key=of) == key(date(2026, 1, 31), lock_key=of)

    def test_structures_count_by_value(self) -> None:
        assert key([1, 2], lock_key="{a}") == key((1, 2), lock_key="{a}")
        assert key([1, 2], lock_key="{a}") != key([2, 1], lock_key="{a}")

    def test_template_that_fails_is_a_clear_error(self) -> None:
        with pytest.raises(InvalidKey, match=r"lock_key '\{a\[id\]\}'"):
            key({}, lock_key="{a[id]}")
        with pytest.raises(InvalidKey, match="lock_key"):
            key(object(), lock_key="{a}")
        with pytest.raises(InvalidKey, match=r"lock_key '\{a:\.2f\}' failed: OverflowError"):
            key(10**400, lock_key="{a:.2f}")


class TestCallable:
    def test_callable_gets_the_bound_arguments(self) -> None:
        seen = []
        key(1, c=3, lock_key=seen.append)
        assert seen == [{"a": 1, "b": 2, "c": 3}]

    def test_callable_and_text_of_a_caller_make_the_same_key(self) -> None:
        assert key(7, lock_key=lambda call: f"tenant:{call['a']}") == key_of_text("tenant:7")

    def test_error_in_a_callable_is_a_clear_error(self) -> None:
        with pytest.raises(InvalidKey, match="callable lock_key raised KeyError") as caught:
            key(1, lock_key=lambda call: call["nope"])
        assert isinstance(caught.value.__cause__, KeyError)

    def test_value_of_a_callable_needs_a_stable_form(self) -> None:
        with pytest.raises(InvalidKey, match="what the callable lock_key returned"):
            key(1, lock_key=lambda call: object())


class TestCheck:
    @pytest.mark.parametrize("lock_key", [None, [], ["a"], ("a", "b"), "{a}", "{a}:{b.c[d]}", "{a!r:>5}", len])
    def test_valid_lock_key_is_accepted(self, lock_key: Any) -> None:
        task_of(f, lock_key)

    @pytest.mark.parametrize(
        ("lock_key", "words"),
        [
            (3, "a list of argument names"),
            ([1], "a list of argument names"),
            ({"a"}, "a list of argument names"),
            (["aa"], "no argument 'aa'"),
            ("{aa}", "no argument 'aa'"),
            ("{}", "names of arguments"),
            ("{0}", "names of arguments"),
            ("{a", "not a valid template"),
            ("{a}{b}", "nothing between"),
        ],
    )
    def test_invalid_lock_key_is_refused(self, lock_key: Any, words: str) -> None:
        with pytest.raises(InvalidOption, match="option lock_key of task task") as caught:
            task_of(f, lock_key)
        assert words in str(caught.value)
        assert repr(lock_key) in str(caught.value)

    @pytest.mark.parametrize("lock_key", ["a", "t:%(a)s", "t:{{a}}", "all", ""])
    def test_text_that_names_no_argument_is_refused(self, lock_key: str) -> None:
        """It would be one lock for all calls, which is hardly meant."""
        with pytest.raises(InvalidOption) as caught:
            task_of(f, lock_key)
        assert f"option lock_key of task task is {lock_key!r}, a template that names no argument" in str(caught.value)
        assert str(caught.value).endswith("as in ['a'] or '{a}', or write [] if they are to share it")

    def test_error_names_the_function(self) -> None:
        with pytest.raises(InvalidOption, match=r"but f has no argument 'x'; it has: a, b, c"):
            task_of(f, ["x"])
        with pytest.raises(InvalidOption, match=r"has no argument 'x'; it has: none"):
            task_of(lambda: None, ["x"])

    def test_star_kwargs_take_any_name(self) -> None:
        task_of(g, ["whatever"])
