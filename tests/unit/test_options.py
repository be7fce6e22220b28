from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from celery.bin.base import CLIContext
from celery.local import Proxy
from celery.utils import uuid
from click.testing import CliRunner

from celery_singleton_lock import CallOptions, DuplicateTask, InvalidOption, SingletonTask
from celery_singleton_lock.cli import locks
from celery_singleton_lock.options import task as options_of_task
from celery_singleton_lock.options.app import Settings
from celery_singleton_lock.options.task import CONFLICTS, replaces

REDIS = "redis://localhost:1/0"


def body(function: Callable[..., Any]) -> Callable[..., Any]:
    """A lambda with a name, so that Celery can make a task of it."""
    function.__name__ = function.__qualname__ = "body"
    return function


def app(**conf: Any) -> Celery:
    made = Celery("options", set_as_current=False)
    made.conf.update({"broker_url": REDIS, "result_backend": None, **conf})
    return made


def settings(**conf: Any) -> Settings:
    return Settings.from_app(app(**conf))


def bill(conf: dict[str, Any] | None = None, **attributes: Any) -> Any:
    """A task with these attributes."""
    made: Any = app(**(conf or {}))
    return made.task(base=SingletonTask, name="shop.bill", shared=False, **attributes)(body(lambda tenant: tenant))


def in_worker(task: Any, call: object = None) -> Any:
    """How a worker locks a message that was sent with these options of a call; None: without a lock."""
    headers: dict[str, Any] = {} if call is None else {"singleton_lock": call}
    return task.lock_options(Context(**headers, delivery_info={}))


def options(*, call: Any = None, conf: Any = None, **attributes: Any) -> Any:
    return in_worker(bill(conf, **attributes), call)


def sent(call: Any, **conf: Any) -> Any:
    """Send a call with these options."""
    return bill({"broker_url": "memory://", **conf}).apply_async((7,), singleton_lock=call)


def audited(made: Celery) -> str:
    """What `celery locks doctor --offline` says."""
    return (
        CliRunner().invoke(locks, ["doctor", "--offline"], obj=CLIContext(app=made, no_color=True, workdir=None)).output
    )


#: With a lock while it waits, and another while it runs.
OF_BOTH_LOCKS = {"broker_url": "memory://", "singleton_lock_scope": "until_and_while_executing"}


def met(task: Any, key: object) -> tuple[str, type[Exception] | None]:
    """How a run of a task ends that meets its held lock, and what a second call raises; its body is not reached."""
    name = task.lock_name or task.name
    made = task.app.task(base=SingletonTask, name="shop.holder", lock_name=name, lock_key=lambda _: key, shared=False)
    state = made(body(lambda: task.apply((7,)).state)).apply().result
    task.delay(7)
    try:
        task.delay(7, 2)
    except DuplicateTask as error:
        return state, type(error)
    return state, None


class Chooses:
    """Its methods need their own `self`."""

    name = "tenant"

    def key(self, arguments: dict[str, Any]) -> Any:
        return arguments[self.name]

    def policy(self, task: Any, met: Exception) -> str:
        return "raise" if self.name == "tenant" else "skip"

    @classmethod
    def class_key(cls, arguments: dict[str, Any]) -> Any:
        return arguments[cls.name]

    @classmethod
    def class_policy(cls, task: Any, met: Exception) -> str:
        return "raise" if cls.name == "tenant" else "skip"


class CalledWith:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def getitem_of(name: str, arguments: dict[str, Any]) -> Any:
    return arguments[name]


class TestDefaults:
    def test_defaults_are_safe(self) -> None:
        defaults = {
            "scope": "while_executing",
            "ttl": 30.0,
            "wait": 0.0,
            "on_conflict": "skip",
            "conflict_retries": None,
            "on_lock_lost": "abort",
            "on_unavailable": "retry",
            "retain_on_retry": False,
            "limit": 1,
            "at_least_for": 0.0,
            "on_duplicate": "existing",
            "queue_ttl": None,
            "on_send_unavailable": "send",
            "key": None,
        }
        assert asdict(options()) == defaults

    def test_defaults_of_a_scope(self) -> None:
        waiting = {"lock_scope": "until_and_while_executing"}
        assert options(**waiting).on_conflict == "retry"
        assert options(**waiting, on_conflict="skip").on_conflict == "skip"
        assert options(**waiting, conf={"singleton_lock_on_conflict": "skip"}).on_conflict == "skip"
        assert options(lock_scope="until_executed").retain_on_retry

    def test_defaults_of_the_app(self) -> None:
        made = settings()
        assert (made.backend.urls, made.prefix, made.enabled) == ((REDIS,), "singleton_lock", True)


#: attribute, setting, key of a call, a good value, bad values
CASES: list[tuple[str, str, str | None, Any, list[Any]]] = [
    ("lock_scope", "singleton_lock_scope", None, "until_executed", ["always", 1, "Until_Executed"]),
    ("lock_ttl", "singleton_lock_ttl", "ttl", 60, [0, 0.5, -1, 86_401, "30", True, float("nan"), float("inf")]),
    ("lock_wait", "singleton_lock_wait", "wait", 2.5, [-1, "2", True, float("inf")]),
    ("on_conflict", "singleton_lock_on_conflict", "on_conflict", "raise", ["replaces", "joins", "Skip", 3, []]),
    ("lock_conflict_retries", "singleton_lock_conflict_retries", "conflict_retries", 5, [-1, 1.5, "5", True]),
    ("on_lock_lost", "singleton_lock_on_lock_lost", "on_lock_lost", "warn", ["ignore", 1]),
    ("on_unavailable", "singleton_lock_on_unavailable", "on_unavailable", "run", ["skip", 1]),
    ("lock_retain_on_retry", "singleton_lock_retain_on_retry", "retain_on_retry", True, [1, "yes", 0.5]),
    ("lock_at_least_for", "singleton_lock_at_least_for", "at_least_for", 2.5, [-1, 86_401, "2", True, float("inf")]),
    ("on_duplicate", "singleton_lock_on_duplicate", None, "raise", ["rerun", "Skip", 3, []]),
    ("lock_queue_ttl", "singleton_lock_queue_ttl", None, 60, [0, 0.5, -1, 2_592_001, "30", True, float("nan")]),
    ("on_send_unavailable", "singleton_lock_on_send_unavailable", None, "raise", ["retry", "skip", 1]),
]
FIELDS = {
    "lock_scope": "scope",
    "lock_ttl": "ttl",
    "lock_wait": "wait",
    "lock_conflict_retries": "conflict_retries",
    "lock_retain_on_retry": "retain_on_retry",
    "lock_at_least_for": "at_least_for",
    "lock_queue_ttl": "queue_ttl",
}


@pytest.mark.parametrize(("attribute", "setting", "key", "good", "bad"), CASES)
class TestEachOption:
    def test_option_on_the_task(self, attribute: str, setting: str, key: str | None, good: Any, bad: list[Any]) -> None:
        assert getattr(options(**{attribute: good}), FIELDS.get(attribute, attribute)) == good

    def test_option_for_the_whole_app(
        self, attribute: str, setting: str, key: str | None, good: Any, bad: list[Any]
    ) -> None:
        assert getattr(options(conf={setting: good}), FIELDS.get(attribute, attribute)) == good

    def test_option_of_a_call(self, attribute: str, setting: str, key: str | None, good: Any, bad: list[Any]) -> None:
        if key is None:
            with pytest.raises(InvalidOption, match="has the key"):
                sent({FIELDS.get(attribute, attribute): good})
            return
        sent({key: good})
        assert getattr(options(call={key: good}), FIELDS.get(attribute, attribute)) == good

    def test_call_beats_task_beats_app(
        self, attribute: str, setting: str, key: str | None, good: Any, bad: list[Any]
    ) -> None:
        field = FIELDS.get(attribute, attribute)
        default = getattr(options(), field)
        if default is not None:
            assert getattr(options(conf={setting: good}, **{attribute: default}), field) == default
        if key is not None:
            assert getattr(options(call={key: default}, **{attribute: good}), field) == default

    def test_error_about_a_value_on_the_task_is_complete(
        self, attribute: str, setting: str, key: str | None, good: Any, bad: list[Any]
    ) -> None:
        for value in bad:
            with pytest.raises(InvalidOption) as caught:
                options(**{attribute: value})
            for part in (attribute, "shop.bill", repr(value), "allowed"):
                assert part in str(caught.value)

    def test_error_about_a_setting_is_complete(
        self, attribute: str, setting: str, key: str | None, good: Any, bad: list[Any]
    ) -> None:
        for value in bad:
            with pytest.raises(InvalidOption) as caught:
                settings(**{setting: value})
            for part in (setting, repr(value), "allowed"):
                assert part in str(caught.value)

    def test_error_about_a_value_of_a_call_is_complete(
        self, attribute: str, setting: str, key: str | None, good: Any, bad: list[Any]
    ) -> None:
        for value in bad if key else []:
            for refused in (partial(sent, {key: value}), partial(options, call={key: value})):
                with pytest.raises(InvalidOption) as caught:
                    refused()
            for part in (str(key), repr(value), "allowed"):
                assert part in str(caught.value)


class TestCall:
    @pytest.mark.parametrize("value", [None, True])
    def test_call_without_options(self, value: object) -> None:
        sent(value)
        assert options(call=value) == options()

    def test_false_switches_the_lock_off(self) -> None:
        assert options(call=False, conf={"singleton_lock_accept": "all"}) is None

    @pytest.mark.parametrize("value", [0, 1, "off", [], ["key"], 2.0])
    def test_anything_else_is_refused(self, value: object) -> None:
        with pytest.raises(InvalidOption, match="dictionary"):
            sent(value)
        with pytest.raises(InvalidOption, match="dictionary"):
            options(call=value)

    def test_unknown_key_is_refused_with_a_hint(self) -> None:
        with pytest.raises(InvalidOption, match="did you mean 'on_conflict'"):
            sent({"on_conflicts": "skip"})

    def test_callable_cannot_be_sent(self) -> None:
        with pytest.raises(InvalidOption, match="no message can carry"):
            sent({"on_conflict": lambda task, conflict: "skip"})

    @pytest.mark.parametrize("key", ["", 7, None, ["a"]])
    def test_key_is_a_text(self, key: object) -> None:
        with pytest.raises(InvalidOption, match="key"):
            sent({"key": key})


#: What a call may ask for.
OF_A_CALL: dict[str, Any] = {"key": "x", "ttl": 3.0, "wait": 1.0, "at_least_for": 1.0, "on_conflict": "raise"} | {
    "conflict_retries": 1,
    "on_lock_lost": "warn",
    "on_unavailable": "run",
    "retain_on_retry": True,
}


class TestAccept:
    def test_type_of_a_calls_options_has_all_options_of_a_call(self) -> None:
        assert {*CallOptions.__annotations__} == {*OF_A_CALL}

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (None, {*OF_A_CALL}),
            ("all", {*OF_A_CALL, "disable"}),
            ("none", set()),
            ([], set()),
            (["wait", "disable"], {"wait", "disable"}),
            (("key",), {"key"}),
        ],
    )
    def test_accept_is_a_word_or_a_list(self, value: object, expected: set[str]) -> None:
        conf = {} if value is None else {"singleton_lock_accept": value}
        for name, its in {**OF_A_CALL, "disable": False}.items():
            call = {name: its} if its is not False else False
            for accepts in (partial(sent, call, **conf), partial(options, call=call, conf=conf)):
                with nullcontext() if name in expected else pytest.raises(InvalidOption, match="singleton_lock_accept"):
                    accepts()

    @pytest.mark.parametrize("value", ["key", "All", ["keys"], [1], 3, True, {"key": 1}, None.__class__])
    def test_anything_else_is_refused(self, value: object) -> None:
        with pytest.raises(InvalidOption, match=r"singleton_lock_accept is .* allowed: 'all', 'none'"):
            options(conf={"singleton_lock_accept": value})

    @pytest.mark.parametrize("call", [False, {"key": "x"}, {"wait": 1.0}])
    def test_error_names_the_setting_and_the_remedy(self, call: Any) -> None:
        with pytest.raises(InvalidOption, match=r"setting singleton_lock_accept allows nothing: add '\w+' to it"):
            sent(call, singleton_lock_accept="none")

    def test_seconds_are_bounded_unless_the_task_has_more(self) -> None:
        for name in ("ttl", "wait", "at_least_for"):
            assert getattr(options(call={name: 3600.0}), name) == 3600
            for refused in (partial(sent, {name: 3601}), partial(options, call={name: 3601})):
                with pytest.raises(InvalidOption, match=f"at most 3600 seconds; for more, set lock_{name} on the task"):
                    refused()
        assert options(call={"ttl": 7200.0}, lock_ttl=7200).ttl == 7200
        assert options(call={"wait": 1e9}, conf={"singleton_lock_wait": 1e9}).wait == 1e9

    def test_call_is_refused_before_it_is_sent(self) -> None:
        with pytest.raises(InvalidOption, match="singleton_lock_accept"):
            bill().apply_async((7,), singleton_lock=False)

    def test_message_cannot_claim_that_it_was_not_sent(self) -> None:
        task = bill({"singleton_lock_backend": "memory://"})
        request = Context(is_eager=True, headers={"singleton_lock": False}, delivery_info={})
        with pytest.raises(InvalidOption, match="singleton_lock_accept"):
            task.lock_options(request)
        applied = Context(is_eager=True, headers={"singleton_lock": False}, delivery_info={"is_eager": True})
        assert task.lock_options(applied) is None

    def test_key_of_any_length_becomes_a_digest(self) -> None:
        task = bill({"singleton_lock_backend": "memory://"})
        request = Context(singleton_lock={"key": "x\ud800" * 100_000}, delivery_info={})
        key = task.lock_of(request, (7,), {}).key
        assert key != task.lock_key_of(7)
        assert len(key) < 100
        assert key.isprintable()


class TestTaskAttributes:
    def test_unknown_lock_option_is_refused(self) -> None:
        with pytest.raises(InvalidOption, match="did you mean 'lock_ttl'"):
            options(lock_tll=3)

    def test_unknown_policy_is_refused(self) -> None:
        with pytest.raises(InvalidOption, match="'rerun'; allowed: 'existing' or 'raise' or 'skip' or 'replace'"):
            options(on_duplicate="rerun")

    @pytest.mark.parametrize(
        ("name", "meant"),
        [
            ("on_conflcit", "on_conflict"),
            ("lcok_ttl", "lock_ttl"),
            ("lock_queue", "lock_queue_ttl"),
            ("lock_lost", "on_lock_lost"),
            ("singleton_lock_wait", "lock_wait"),
        ],
    )
    def test_similar_name_is_proposed(self, name: str, meant: str) -> None:
        with pytest.raises(InvalidOption, match=f"'{name}'; did you mean '{meant}'"):
            options(**{name: 5})

    @pytest.mark.parametrize("name", ["on_conflcit", "on_dupliacte", "lock_kye"])
    def test_swapped_letters_are_found_even_if_the_value_is_a_function(self, name: str) -> None:
        with pytest.raises(InvalidOption, match=f"'{name}'; did you mean '(on_conflict|on_duplicate|lock_key)'"):
            options(**{name: lambda *_: "skip"})

    def test_options_of_a_call_are_refused_on_a_task(self) -> None:
        with pytest.raises(InvalidOption, match="'singleton_lock', an option of a call; on a task, set lock_ttl"):
            options(singleton_lock={"ttl": 5})

    @pytest.mark.parametrize("name", ["lock_time", "lock_mode", "lock_hold", "lock_count"])
    def test_ambiguous_name_gets_no_guess(self, name: str) -> None:
        with pytest.raises(InvalidOption, match=f"'{name}'; allowed: lock_key"):
            options(**{name: 5})

    @pytest.mark.parametrize(
        ("foreign", "here"),
        [
            ({"once": {"keys": ["tenant_id"], "graceful": True}}, "celery-once; what to write instead is in https://"),
            ({"unique_on": ["tenant_id"]}, "celery-singleton; what to write instead is in https://"),
            ({"raise_on_duplicate": True}, "celery-singleton; what to write instead is in https://"),
            ({"heimdall": {"unique": True}}, "celery-heimdall; what to write instead is in https://"),
            ({"lock_expiry": 3600}, "celery-singleton; what to write instead is in https://"),
            ({"once": {}}, "celery-once; what to write instead is in https://"),
            ({"unique_on": "tenant_id"}, "celery-singleton; what to write instead is in https://"),
        ],
    )
    def test_options_of_other_packages_are_refused(self, foreign: dict[str, Any], here: str) -> None:
        with pytest.raises(InvalidOption, match=here):
            options(**foreign)

    def test_attributes_of_users_are_left_alone(self) -> None:
        options(once=True, heimdall="x", on_failure_mail="me@example.org", scope="global", ttl=5, timeout=60)
        options(clock_key="x", log_key="y", link_ttl=5, on_conflict_mail="me@example.org", on_conflicted=lambda: None)

    def test_attributes_of_other_packages_are_found_in_a_base_class(self) -> None:
        class Base(SingletonTask):
            abstract = True
            raise_on_duplicate = False

        with pytest.raises(InvalidOption, match="celery-singleton; what to write instead is in https://"):
            app().task(base=Base, name="shop.bill", shared=False, lazy=False)(body(lambda tenant: None))

    @pytest.mark.parametrize("name", ["", 3, []])
    def test_lock_name_is_a_text(self, name: object) -> None:
        with pytest.raises(InvalidOption, match="lock_name"):
            options(lock_name=name)

    def test_function_as_an_option_does_not_become_a_method(self) -> None:
        def decide(task: Any, conflict: Any) -> str:
            return "skip"

        assert options(on_conflict=decide).on_conflict is decide

    @pytest.mark.parametrize("kind", ["method", "class method", "static method", "object", "partial", "function"])
    def test_anything_that_can_be_called_is_called_with_what_it_asks_for(self, kind: str) -> None:
        keys, policies = {
            "method": (Chooses().key, Chooses().policy),
            "class method": (Chooses.class_key, Chooses.class_policy),
            "static method": (staticmethod(lambda its: its["tenant"]), staticmethod(lambda task, met: "raise")),
            "object": (CalledWith(lambda its: its["tenant"]), CalledWith(lambda task, met: "raise")),
            "partial": (partial(getitem_of, "tenant"), partial(lambda policy, task, met: policy, "raise")),
            "function": (lambda its: its["tenant"], lambda task, met: "raise"),
        }[kind]
        made: Any = app(**OF_BOTH_LOCKS, singleton_lock_prefix=uuid())
        options: dict[str, Any] = {"lock_key": keys, "on_conflict": policies, "on_duplicate": policies}
        task = made.task(base=SingletonTask, shared=False, **options)(body(lambda tenant, month=1: None))
        assert task.lock_key_of(7) == task.lock_key_of(7, 2) != task.lock_key_of(8)
        assert met(task, 7) == ("FAILURE", DuplicateTask)

    def test_methods_of_the_tasks_own_class_are_its_options(self) -> None:
        class Job(SingletonTask):
            name = "job"
            chosen = "raise"

            def run(self, tenant: int, month: int = 1) -> None: ...

            def lock_key(self, arguments: dict[str, Any]) -> Any:
                return self.name, arguments["tenant"]

            def on_conflict(self, conflict: Exception) -> str:
                return self.chosen

            @classmethod
            def on_duplicate(cls, task: Any, duplicate: Exception) -> str:
                return cls.chosen

        made: Any = app(**OF_BOTH_LOCKS, singleton_lock_prefix=uuid())
        task = made.register_task(Job())
        task.bind(made)
        assert task.lock_key_of(7) == task.lock_key_of(7, 2) != task.lock_key_of(8)
        assert met(task, ("job", 7)) == ("FAILURE", DuplicateTask)

    @pytest.mark.parametrize("name", ["on_conflict", "on_duplicate"])
    @pytest.mark.parametrize("policy", [lambda met: "skip", lambda a, b, c: "skip", len])
    def test_callable_that_takes_something_else_is_refused_when_bound(self, name: str, policy: Any) -> None:
        with pytest.raises(InvalidOption, match=rf"{name}.*or a callable of \(task, (conflict|duplicate)\)"):
            options(**{name: policy})
        with pytest.raises(InvalidOption, match=rf"{name}.*or a callable of \(task, (conflict|duplicate)\)"):
            settings(**{f"singleton_lock_{name}": policy})

    def test_callable_without_a_signature_is_accepted(self) -> None:
        assert options(on_conflict=max).on_conflict is max

    def test_option_that_is_set_later_counts_from_then_on(self) -> None:
        task = bill({"singleton_lock_ttl": 7}, lock_ttl=60)
        assert in_worker(task).ttl == 60
        assert in_worker(task, {"ttl": 5.0}).ttl == 5
        task.lock_ttl = 90
        assert in_worker(task).ttl == 90
        task.lock_ttl = None
        assert in_worker(task).ttl == 7
        task.lock_ttl = 0
        with pytest.raises(InvalidOption, match=r"lock_ttl of task shop\.bill is 0"):
            in_worker(task)

    def test_proxy_of_a_task_has_its_options(self) -> None:
        """`shared_task` returns a proxy."""
        task = bill(lock_ttl=60)
        assert in_worker(Proxy(lambda: task)).ttl == 60

    def test_property_says_an_option_when_it_is_asked(self) -> None:
        class Busy(SingletonTask):
            name = "busy"
            seconds: Any = 60.0

            @property
            def lock_ttl(self) -> Any:  # type: ignore[override]
                return self.seconds

            def run(self) -> None: ...

        task = app().register_task(Busy())
        assert in_worker(task).ttl == 60
        task.seconds = 90
        assert in_worker(task).ttl == 90
        task.seconds = 0
        with pytest.raises(InvalidOption, match=r"lock_ttl of task busy is 0"):
            in_worker(task)

    def test_subclass_sets_options_for_its_tasks(self) -> None:
        class Slow(SingletonTask):
            lock_ttl = 90.0

        task = app().task(base=Slow, name="slow", shared=False)(body(lambda: None))
        assert in_worker(task).ttl == 90.0


@pytest.mark.parametrize("policy", ["skip", lambda task, conflict: "skip"], ids=["name", "function"])
def test_task_is_not_kept_alive_longer_than_its_app(policy: Any) -> None:
    """Its options are cached for the next execution."""
    task = bill({"singleton_lock_backend": "memory://"}, on_conflict=policy)
    for _ in range(2):
        in_worker(task)
    gone = weakref.ref(task.__class__)
    del task
    gc.collect()
    assert gone() is None


NEWEST = ("rerun", "replace")
OF_ONE_CALL = ("on_conflict", "lock_conflict_retries", "on_lock_lost")
JOINS: dict[str, Any] = {"on_conflict": "join", "conf": {"result_backend": "redis://localhost:1/1"}}
REDLOCK = {"singleton_lock_backend": "redis://:s3cret@a;redis://b;redis://c"}

#: Options that cannot work together, and the error; at least one case for each row of the table.
TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"lock_scope": "until_expired"}, "lock_scope of task .* needs lock_queue_ttl"),
    ({"on_conflict": "join"}, "on_conflict of task .* needs a result backend that workers can read"),
    (
        {"on_conflict": "join", "conf": {"result_backend": "rpc://"}},
        "on_conflict of task .* needs a result backend",
    ),
    ({**JOINS, "ignore_result": True}, "on_conflict of task .* needs its results: set ignore_result=False"),
    ({**JOINS, "conf": {**JOINS["conf"], "singleton_lock_done_ttl": 0}}, "needs singleton_lock_done_ttl above 0"),
    ({**JOINS, "lock_limit": 2}, "on_conflict of task .* needs lock_limit=1, found 2"),
    ({"on_duplicate": "replace", "lock_scope": "until_executed"}, "on_duplicate of task .* with lock_scope"),
    (
        {"on_duplicate": "replace", "lock_scope": "until_executing", "lock_limit": 2},
        "on_duplicate of task .* with lock_limit 2; allowed: lock_limit 1",
    ),
    *(({"on_conflict": policy, "lock_limit": 2}, "with a limit, use on_conflict='retry'") for policy in NEWEST),
    *(({"on_conflict": policy, "lock_scope": "until_executing"}, "with lock_scope") for policy in NEWEST),
    *(({"on_conflict": policy, "lock_conflict_retries": 3}, "with lock_conflict_retries 3") for policy in NEWEST),
    ({"on_conflict": "replace", "on_lock_lost": "warn"}, "on_conflict of task .* with on_lock_lost 'warn'"),
    *(
        ({**given, "conf": REDLOCK}, rf"of task shop.bill is .*, which does not work on a Redlock \(.*{allowed}")
        for given, allowed in (
            ({"lock_limit": 2}, "lock_limit 1"),
            ({"on_duplicate": "replace", "lock_scope": "until_executing"}, "'existing', 'raise' or 'skip'"),
            ({"on_conflict": "rerun"}, "another policy"),
            ({"on_conflict": "replace"}, "another policy"),
        )
    ),
]


@pytest.mark.parametrize(("given", "why"), TOGETHER)
def test_options_that_cannot_work_together_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidOption, match=why) as caught:
        options(**given)
    assert "s3cret" not in str(caught.value)
    if not {"lock_scope", "lock_limit", "on_duplicate"} & {*given}:
        call = {name.removeprefix("lock_"): value for name, value in given.items() if name in OF_ONE_CALL}
        rest = {name: value for name, value in given.items() if name not in OF_ONE_CALL}
        with pytest.raises(InvalidOption, match=why):
            options(call=call, **rest)


def test_each_conflict_of_options_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [(given, bill(**given), settings(**given.get("conf", {}))) for given, _ in TOGETHER]
    monkeypatch.setattr(options_of_task, "CONFLICTS", ())
    chosen = [(in_worker(task), task, its) for _, task, its in made]
    assert [it.why for it in CONFLICTS if not any(it.is_met(*one) for one in chosen)] == []


def test_option_of_the_whole_app_is_refused_with_the_name_of_the_task() -> None:
    with pytest.raises(InvalidOption, match="option on_conflict of task"):
        options(conf={**REDLOCK, "singleton_lock_on_conflict": "rerun"})


def test_nothing_is_joined_in_an_eager_app() -> None:
    assert options(on_conflict="join", conf={"task_always_eager": True}).on_conflict == "join"


def test_callable_cannot_choose_what_would_be_refused() -> None:
    task = bill(REDLOCK, on_duplicate=lambda task, duplicate: "replace", lock_scope="until_executing")
    chosen = in_worker(task)
    assert not replaces(task, chosen, settings(**REDLOCK))
    assert replaces(task, chosen, settings())


class TestSettings:
    def test_message_protocol_1_is_refused(self) -> None:
        with pytest.raises(InvalidOption, match=r"setting task_protocol is 1.* or set it to 2"):
            settings(task_protocol=1)
        assert "task_protocol" in audited(app(task_protocol=1))
        assert not settings(task_protocol=1, singleton_lock_enabled=False).enabled

    def test_unknown_setting_is_refused_with_a_hint(self) -> None:
        with pytest.raises(InvalidOption, match="singleton_lock_tll; did you mean 'singleton_lock_ttl'"):
            settings(singleton_lock_tll=3)

    @pytest.mark.parametrize(
        ("name", "hint"),
        [
            ("singleton_lock_redis_url", "; allowed: singleton_lock_accept, "),
            ("singleton_lock_key", "; set lock_key on the task"),
            ("singleton_lock_nonsense", "; allowed: singleton_lock_accept, "),
        ],
    )
    def test_hint_does_not_name_a_setting_that_only_begins_alike(self, name: str, hint: str) -> None:
        with pytest.raises(InvalidOption, match=re.escape(f"there is no setting {name}{hint}")):
            settings(**{name: 1})

    @pytest.mark.parametrize("value", [1, "yes", "False"])
    def test_enabled_is_a_boolean(self, value: object) -> None:
        with pytest.raises(InvalidOption, match="singleton_lock_enabled"):
            settings(singleton_lock_enabled=value)

    @pytest.mark.parametrize("value", ["", "a{b}", "a b", "ä", "x" * 101, 3])
    def test_prefix_cannot_break_a_key(self, value: object) -> None:
        with pytest.raises(InvalidOption, match="singleton_lock_prefix"):
            settings(singleton_lock_prefix=value)

    @pytest.mark.parametrize(
        ("conf", "prefix"),
        [
            ({"broker_transport_options": {"global_keyprefix": "shop:"}}, "shop:singleton_lock"),
            ({"broker_transport_options": {"global_keyprefix": "{shop}"}}, "shopsingleton_lock"),
            ({"broker_transport_options": {"global_keyprefix": ""}}, "singleton_lock"),
            (
                {"broker_transport_options": {"global_keyprefix": "shop:"}, "singleton_lock_backend": "redis://locks"},
                "shop:singleton_lock",
            ),
            (
                {"broker_transport_options": {"global_keyprefix": "shop:"}, "singleton_lock_prefix": "mine"},
                "mine",
            ),
            (
                {
                    "broker_url": "amqp://",
                    "broker_transport_options": {"global_keyprefix": "unused:"},
                    "result_backend": "redis://results",
                    "result_backend_transport_options": {"global_keyprefix": "results:"},
                },
                "results:singleton_lock",
            ),
            (
                {
                    "broker_url": "amqp://",
                    "broker_transport_options": {"global_keyprefix": "unused:"},
                    "singleton_lock_backend": "redis://locks",
                },
                "singleton_lock",
            ),
        ],
    )
    def test_prefix_begins_with_what_sets_the_apps_keys_apart(self, conf: dict[str, Any], prefix: str) -> None:
        assert settings(**conf).prefix == prefix

    def test_key_prefix_that_is_too_long_is_refused(self) -> None:
        with pytest.raises(InvalidOption, match="singleton_lock_prefix, which begins with global_keyprefix unless"):
            settings(broker_transport_options={"global_keyprefix": "x" * 90})

    @pytest.mark.parametrize(("key_prefix", "kept"), [("ä b[1]:", "b1:"), ("{shop}:", "shop:"), ("[]", "")])
    def test_what_no_prefix_may_have_is_left_out(self, key_prefix: str, kept: str) -> None:
        assert settings(broker_transport_options={"global_keyprefix": key_prefix}).prefix == f"{kept}singleton_lock"

    @pytest.mark.parametrize("value", [-1, "3600", True, float("nan"), 2_592_001])
    def test_done_ttl_is_in_seconds(self, value: object) -> None:
        with pytest.raises(InvalidOption, match="singleton_lock_done_ttl"):
            settings(singleton_lock_done_ttl=value)

    @pytest.mark.parametrize(
        ("timeout", "remembered"), [(None, 3600), (3, 3600), (43_200, 43_200), (10**9, 2_592_000), ("x", 3600)]
    )
    def test_done_ttl_is_the_visibility_timeout_but_at_least_an_hour(self, timeout: object, remembered: int) -> None:
        assert settings(broker_transport_options={"visibility_timeout": timeout}).done_ttl == remembered
        assert settings(singleton_lock_done_ttl=5, broker_transport_options={"visibility_timeout": 9}).done_ttl == 5

    @pytest.mark.parametrize("value", ["x", 3, [("a", 1)]])
    def test_transport_options_are_a_dictionary(self, value: object) -> None:
        with pytest.raises(InvalidOption, match="singleton_lock_transport_options"):
            settings(singleton_lock_transport_options=value)

    def test_settings_are_read_from_the_django_namespace(self) -> None:
        made = Celery("django-like", set_as_current=False)
        django = SimpleNamespace(CELERY_BROKER_URL=REDIS, CELERY_SINGLETON_LOCK_TTL=45, CELERY_TIMEZONE="UTC")
        made.config_from_object(django, namespace="CELERY")
        assert Settings.from_app(made).defaults["ttl"] == 45

    def test_typo_in_the_django_namespace_is_found(self) -> None:
        made = Celery("django-like", set_as_current=False)
        django = SimpleNamespace(CELERY_BROKER_URL=REDIS, CELERY_SINGLETON_LOCK_TLL=45)
        made.config_from_object(django, namespace="CELERY")
        with pytest.raises(InvalidOption, match="singleton_lock_tll"):
            Settings.from_app(made)


class TestBackend:
    def test_setting_beats_the_broker(self) -> None:
        assert settings(singleton_lock_backend="redis://other/3").backend.urls == ("redis://other/3",)

    def test_result_backend_is_used_if_the_broker_is_not_redis(self) -> None:
        made = settings(broker_url="amqp://localhost", result_backend="redis://results/1")
        assert made.backend.urls == ("redis://results/1",)

    def test_memory_broker_means_memory_locks(self) -> None:
        assert settings(broker_url="memory://").backend.urls == ("memory://",)

    def test_missing_backend_is_a_clear_error(self) -> None:
        with pytest.raises(InvalidOption, match="singleton_lock_backend is not set"):
            settings(broker_url="amqp://localhost", result_backend="rpc://")

    def test_no_backend_is_needed_when_locks_are_disabled(self) -> None:
        assert not settings(broker_url="amqp://localhost", singleton_lock_enabled=False).enabled

    def test_failover_list_of_the_broker_is_not_used(self) -> None:
        with pytest.raises(InvalidOption, match="singleton_lock_backend is not set"):
            settings(broker_url="redis://a;redis://b")

    @pytest.mark.parametrize(
        "urls",
        [
            "redis://:s3cret@a;redis://:s3cret@b",
            "redis://:s3cret@a;redis://:s3cret@a;redis://:s3cret@b",
            "redis://:s3cret@a;sentinel://:s3cret@b;redis://:s3cret@c",
            "sentinel://:s3cret@a;redis+cluster://:s3cret@b",
            ";".join(f"redis://:s3cret@{number}" for number in range(11)),
            "memory://;memory://;memory://",
        ],
    )
    def test_several_servers_without_a_redlock_are_refused(self, urls: str) -> None:
        with pytest.raises(InvalidOption, match="singleton_lock_backend") as caught:
            settings(singleton_lock_backend=urls)
        assert "s3cret" not in str(caught.value)

    def test_sentinels_of_the_broker_include_the_masters_name(self) -> None:
        options = {"master_name": "mymaster", "visibility_timeout": 60}
        made = settings(broker_url="sentinel://a;sentinel://b", broker_transport_options=options)
        assert made.backend.urls == ("sentinel://a", "sentinel://b")
        assert made.transport_options == {"master_name": "mymaster"}

    @pytest.mark.parametrize("url", ["localhost", "http://:s3cret@x", "amqp://a", "redis:/x", "", "redis"])
    def test_other_schemes_are_refused(self, url: str) -> None:
        with pytest.raises(InvalidOption, match="singleton_lock_backend") as caught:
            settings(singleton_lock_backend=url)
        assert "s3cret" not in str(caught.value)

    def test_tls_options_of_the_broker_are_used_with_its_url(self) -> None:
        made = settings(broker_url="rediss://h", broker_use_ssl={"ssl_cert_reqs": "none"})
        assert made.transport_options == {"ssl_cert_reqs": "none"}


class TestMisplacedInACall:
    """Options in a call that Celery would pass on without any effect."""

    @pytest.mark.parametrize(
        ("given", "instead"),
        [
            ({"once": {"graceful": True}}, "'once', an option of celery-once; what to write instead is in https://"),
            (
                {"unique_on": ["tenant"]},
                "'unique_on', an option of celery-singleton; what to write instead is in https://",
            ),
            (
                {"raise_on_duplicate": True},
                "'raise_on_duplicate', an option of celery-singleton; what to write instead is in https://",
            ),
            ({"lock_expiry": 60}, "'lock_expiry', an option of celery-singleton; what to write instead"),
            (
                {"heimdall": {"unique": True}},
                "'heimdall', an option of celery-heimdall; what to write instead is in https://",
            ),
            ({"lock_ttl": 5}, "'lock_ttl', which a call does not have; use singleton_lock={'ttl': …}"),
            ({"lock_key": "x"}, "'lock_key', which a call does not have; use singleton_lock={'key': …}"),
            ({"on_conflict": "raise"}, "use singleton_lock={'on_conflict': …}"),
            ({"on_duplicate": "raise"}, "'on_duplicate', which a call does not have; set it on the task"),
            ({"lock_scope": "until_executed"}, "'lock_scope', which a call does not have; set it on the task"),
            ({"on_conflcit": "raise"}, "'on_conflcit'; for an option of this package, use singleton_lock"),
            ({"singelton_lock": {"ttl": 5}}, "'singelton_lock'; for an option of this package, use singleton_lock"),
            ({"singleton_locks": {"ttl": 5}}, "'singleton_locks'; for an option of this package, use singleton_lock"),
            ({"lock_timeout": 5}, "'lock_timeout'; for an option of this package, use singleton_lock"),
        ],
    )
    @pytest.mark.parametrize("how", ["apply_async", "apply", "set"])
    def test_misplaced_option_is_refused(self, how: str, given: dict[str, Any], instead: str) -> None:
        made = app(task_always_eager=True, singleton_lock_backend="memory://")
        task = made.task(base=SingletonTask, name="shop.bill", shared=False)(body(lambda tenant: None))
        call = task.s(7).set(**given).apply_async if how == "set" else partial(getattr(task, how), (7,), **given)
        with pytest.raises(InvalidOption, match=r"a call of shop\.bill has the option ") as caught:
            call()
        assert instead in str(caught.value)

    def test_options_of_celery_and_of_others_are_left_alone(self) -> None:
        made = app(task_always_eager=True, singleton_lock_backend="memory://")
        task = made.task(base=SingletonTask, name="shop.bill", shared=False)(body(lambda tenant: tenant))
        result = task.apply_async((7,), countdown=1, link=[], once=True, timeout=5, queue="q", priority=3)
        assert result.get() == 7
