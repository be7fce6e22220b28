"""Connections to simulated servers: what an interruption, a race or an odd answer must not leave behind."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from redis.connection import ConnectionPool
from redis.crc import key_slot

from celery_singleton_lock import clock
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.stores.base import Freeing, Held, LockRequest, Record
from celery_singleton_lock.stores.redis import lock_commands, repeater
from celery_singleton_lock.stores.redis.cluster import Cluster
from celery_singleton_lock.stores.redis.redlock import commands, conversation
from celery_singleton_lock.stores.redis.redlock.conversation import Conversation
from celery_singleton_lock.stores.redis.redlock.store import RedlockStore
from celery_singleton_lock.stores.redis.script import BATCH, Script
from celery_singleton_lock.stores.redis.server import Server
from celery_singleton_lock.stores.redis.store import TRIES, RedisStore
from celery_singleton_lock.stores.redis.waiter import RedisWakeUp
from tests.fuzz.targets.answers import KEY, PlayedServer, Player, Wire, as_resp

RECORD = Record("id:0.0", b"x", 60.0)
TTL = 30.0


class InTurn(Player):
    """Gives its answers to a script one after the other, and then answers as a server does."""

    def __init__(self, answers: dict[Script, Sequence[Any]]) -> None:
        super().__init__()
        self.left = {script.sha.encode(): deque(given) for script, given in answers.items()}
        self.asked: list[Sequence[bytes]] = []

    def answer(self, command: Sequence[bytes]) -> bytes:
        self.asked.append(command)
        left = self.left.get(command[1]) if command[0] == b"EVALSHA" else None
        return as_resp(left.popleft()) if left else super().answer(command)


class Deaf(InTurn):
    """Never answers a script."""

    def __init__(self, script: Script) -> None:
        super().__init__({})
        self.script = script

    def answer(self, command: Sequence[bytes]) -> bytes:
        return b"" if command[1] == self.script.sha.encode() else super().answer(command)


class Silent(Player):
    """Never answers."""

    def answer(self, _: Sequence[bytes]) -> bytes:
        return b""


class Replaced(Player):
    """A master that was replaced: it does not write any more, and answers what it only reads."""

    def __init__(self, refusal: str) -> None:
        super().__init__()
        self.refusal = refusal

    def answer(self, command: Sequence[bytes]) -> bytes:
        if command[1] == lock_commands.RECORDED.sha.encode():
            return as_resp([1])
        return as_resp(Exception(self.refusal))


class CountedServer(PlayedServer):
    """Counts its connections; there are no new ones while it `is_away`."""

    opened, missed, is_away = 0, 0, False

    def open(self, step: float | None = None) -> Any:
        if self.is_away:
            self.missed += 1
            raise TimeoutError
        self.opened += 1
        return super().open(step)


class OfCluster(InTurn):
    """Has all slots, or that `master` has them, as far as it knows; or `has_lost` the other nodes."""

    def __init__(self, host: str, master: str = "") -> None:
        super().__init__({})
        self.host, self.master, self.has_lost = host, master or host, False
        #: Those whom it shows as replicas.
        self.others: Sequence[str] = ()

    def answer(self, command: Sequence[bytes]) -> bytes:
        if command[0] == b"CLUSTER":
            return as_resp([[0, 16383, *([host, 1] for host in (self.master, *self.others))]])
        return as_resp(Exception("CLUSTERDOWN The cluster is down")) if self.has_lost else super().answer(command)


class PlayedCluster(Cluster):
    def __init__(self, *players: OfCluster) -> None:
        for each in players:
            each.others = [it.host for it in players]
        self.played = {(it.host, 1): CountedServer(it) for it in players}
        super().__init__([*self.played], lambda host, port: ConnectionPool())

    def _server(self, address: tuple[str, int]) -> Server:
        return self._servers.setdefault(address, self.played[address])


def played(answers: dict[Script, Sequence[Any]] | None = None) -> CountedServer:
    return CountedServer(InTurn(answers or {}))


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    monkeypatch.setattr(repeater.Repeater, "start", lambda self: None)
    with ExitStack() as exits:
        yield exits


def redlock(exits: ExitStack, servers: Sequence[PlayedServer]) -> RedlockStore:
    store = RedlockStore(servers, "s", memory=None)
    exits.callback(store.close)
    return store


def asked(**options: Any) -> LockRequest:
    return LockRequest(KEY, new_owner(), **{"ttl": TTL, "holder": Holder("another"), **options})


def leases(count: int) -> list[Lease]:
    return [Lease(f"k:{{{n}}}", new_owner(), ttl=TTL, fence=1, sent_at=clock.now(), slot=0) for n in range(count)]


def interrupted_after(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step that is followed by Ctrl-C; not in threads that other tests have left."""
    here = threading.current_thread()

    def interrupted(*args: Any) -> Any:
        answer = step(*args)
        if threading.current_thread() is here:
            raise KeyboardInterrupt
        return answer

    return interrupted


class TestInterrupted:
    """Ctrl-C, or a time limit, between two lines."""

    def test_sent_command_is_known_to_be_pending(self, exits: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        """Otherwise the next user would get the connection, with the waiter's wake-up as an answer."""
        server = played()
        exits.callback(server.close)
        monkeypatch.setattr(Wire, "sendall", interrupted_after(Wire.sendall))
        with pytest.raises(KeyboardInterrupt), ExitStack() as left:
            wake_up = RedisWakeUp(KEY, lambda: server, "s")
            left.push(wake_up)
            wake_up.wait(1.0)
        assert not server._free

    def test_lock_is_freed_later(self, exits: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is not known whether the server has carried out the call."""
        store, hold = RedisStore(played(), "s"), Hold(KEY, new_owner(), ttl=TTL)
        exits.callback(store.close)
        monkeypatch.setattr(store._servers, "run", interrupted_after(store._servers.run))
        with pytest.raises(KeyboardInterrupt):
            store.free(hold)
        assert store._pending.ids() == [("free", KEY, hold.owner)]

    def test_pending_calls_outlive_their_conversation(self, exits: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        store = redlock(exits, [played(), played(), CountedServer(Deaf(lock_commands.FREE))])
        monkeypatch.setattr(Conversation, "put_away", interrupted_after(Conversation.put_away))
        with pytest.raises(KeyboardInterrupt):
            store.free(Hold(KEY, new_owner(), ttl=TTL))
        assert [node.has_pending for node in store._nodes.each] == [False, False, True]


class Emptied(deque[Any]):
    """As if another thread took the last element right after a look."""

    def __bool__(self) -> bool:
        return True


@pytest.mark.parametrize("what", ["connections", "conversations"])
def test_closing_while_a_thread_takes_the_last_one_is_not_an_error(exits: ExitStack, what: str) -> None:
    store = redlock(exits, [played()])
    if what == "connections":
        store._nodes.each[0].server._free = Emptied()
    else:
        store._nodes._conversations = Emptied()
    store.close()


def assert_keeps_no_lease_alive(exits: ExitStack, store: RedisStore | RedlockStore) -> None:
    """Not even until Python looks for cycles: the heartbeat renews what somebody refers to."""
    held = leases(BATCH + 1)
    gone = weakref.ref(held[0])
    gc.disable()
    exits.callback(gc.enable)
    with suppress(LockUnavailable):
        store.renew(held, timeout=1.0)
    held.clear()
    assert gone() is None


class TestAnswers:
    def test_invalid_answer_does_not_affect_the_other_answers(self, exits: ExitStack) -> None:
        server = played({lock_commands.RENEW: [7]})
        store = RedisStore(server, "s")
        exits.callback(store.close)
        held = leases(BATCH + 1)
        ends = [lease.trusted_until for lease in held]
        with pytest.raises(LockUnavailable, match="7 is not an answer"):
            store.renew(held, timeout=1.0)
        renewed = [lease.trusted_until > end for lease, end in zip(held, ends, strict=True)]
        assert renewed == [False] * BATCH + [True]
        assert not server._free, "the next answers on that connection may belong to another question"

    def test_silence_in_a_cluster_keeps_no_lease_alive(self, exits: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        node = OfCluster("node")
        store = RedisStore(PlayedCluster(node), "s")
        exits.callback(store.close)
        assert store.free(Hold(KEY, new_owner(), ttl=TTL))
        monkeypatch.setattr(node, "answer", lambda command: b"")
        assert_keeps_no_lease_alive(exits, store)

    def test_request_for_more_slots_costs_no_connection(self, exits: ExitStack) -> None:
        servers = [played({lock_commands.REFUSE: [[5, 3]]}) for _ in range(3)]
        store = redlock(exits, servers)
        assert store.refuse(KEY, Holder("id"), RECORD) is None
        assert [server.opened for server in servers] == [1, 1, 1]


def test_thread_takes_the_connections_that_are_there(exits: ExitStack) -> None:
    """Not those of a thread that could not connect just now, as on a slow network."""
    servers = [played() for _ in range(3)]
    store = redlock(exits, servers)
    with ExitStack() as left_last, store._nodes.conversation():
        for server in servers:
            server.is_away = True
        left_last.enter_context(store._nodes.conversation())
    assert store.free(Hold(KEY, new_owner(), ttl=TTL)) == Freeing.NOW
    assert len(store._nodes._conversations) == 2, "the other one is kept as well"


class TestUnused:
    """A server's connections that nobody uses are more than a call has tries, and all break: the server was restarted,
    or replaced without a word.
    """

    @pytest.fixture(params=["closed", "silent"])
    def store(self, exits: ExitStack, request: pytest.FixtureRequest) -> RedisStore:
        server = played()
        with ExitStack() as threads:
            wires = [threads.enter_context(server.connection())._socket for _ in range(3 * TRIES)]
        for wire in wires:
            if request.param == "closed":
                wire.theirs.close()
            else:
                wire.player = Silent()
        store = RedisStore(server, "s")
        exits.callback(store.close)
        return store

    def test_call_opens_a_new_one(self, store: RedisStore) -> None:
        assert isinstance(store.acquire(asked()), Lease)

    def test_renewal_opens_a_new_one(self, store: RedisStore) -> None:
        (lease,) = leases(1)
        end = lease.trusted_until
        with suppress(LockUnavailable):  # A silent server is not asked again at once.
            store.renew([lease], timeout=1.0)
        assert store.renew([lease], timeout=1.0) == [True]
        assert lease.trusted_until > end

    def test_interruption_leaves_the_others_alone(self, store: RedisStore) -> None:
        server = store._servers
        with pytest.raises(KeyboardInterrupt), server.connection():
            raise KeyboardInterrupt
        assert len(server._free) == 3 * TRIES - 1


class TestReplaced:
    """The connections to a server are open, but it is no longer the master; a new connection finds the new one."""

    @pytest.fixture(params=["READONLY It is a replica", "MASTERDOWN Link is down", "NOREPLICAS Not enough of them"])
    def refusal(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def server(self, exits: ExitStack, refusal: str) -> CountedServer:
        server = played({lock_commands.RECORDED: [[2, RECORD.content.decode(), 500]]})
        exits.callback(server.close)
        with ExitStack() as threads:
            for _ in range(3):
                threads.enter_context(server.connection())._socket.player = Replaced(refusal)
        return server

    def test_renewal_finds_the_new_one(self, server: CountedServer) -> None:
        """A child of a pool may use the store for nothing else."""
        store, held = RedisStore(server, "s"), leases(1)
        with pytest.raises(LockUnavailable, match="ReadOnlyError"):
            store.renew(held, timeout=1.0)
        assert store.renew(held, timeout=1.0) == [True]

    def test_question_finds_the_new_one(self, server: CountedServer) -> None:
        """Maybe not at once: too few replicas may also be a matter of minutes."""
        store = RedisStore(server, "s")
        with suppress(LockUnavailable):
            store.refuse(KEY, Holder("id"), RECORD)
        assert store.refuse(KEY, Holder("id"), RECORD) is None

    def test_look_finds_the_new_one(self, server: CountedServer) -> None:
        """A program may do nothing else. As for a question: maybe not at once."""
        store = RedisStore(server, "s")
        with suppress(LockUnavailable):
            store.held(KEY)
        assert store.held(KEY) == []

    def test_end_of_a_message_finds_the_new_one(self, server: CountedServer) -> None:
        store = RedisStore(server, "s")
        store._pending.add(("free", KEY, "x"), lock_commands.free(Hold.of_nobody(KEY), record=RECORD), seconds=TTL)
        assert [store._pending._repeat() for _ in range(2)] == [True, False]

    def test_old_one_is_not_asked_about_what_it_was_not_told(self, server: CountedServer) -> None:
        store = RedisStore(server, "s")
        store._pending.add(("free", KEY, "x"), lock_commands.free(Hold.of_nobody(KEY), record=RECORD), seconds=TTL)
        found = store.recorded(KEY, RECORD.message)
        assert found is not None
        assert found.content == RECORD.content
        assert not store._pending


@pytest.mark.parametrize("is_answered", [False, True])
def test_thread_waits_for_the_last_answer_to_a_release(
    exits: ExitStack, monkeypatch: pytest.MonkeyPatch, is_answered: bool
) -> None:
    """The connection may break after the release, and nobody else may use the store."""
    store = redlock(exits, [played(), played(), played() if is_answered else CountedServer(Deaf(lock_commands.FREE))])
    started: list[repeater.Repeater] = []
    monkeypatch.setattr(repeater.Repeater, "start", lambda it: started.append(it))
    assert store.free(Hold(KEY, new_owner(), ttl=TTL)) == Freeing.NOW
    assert started == ([] if is_answered else [store._nodes._repeater])
    monkeypatch.setattr(conversation, "_UNUSED", -1.0)
    assert store._nodes._repeat() is not is_answered


class Forgetful(PlayedCluster):
    """Another thread, whose call fails, forgets the map as soon as it was read."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, {} if name == "_slots" else value)


def test_map_that_another_thread_forgets_can_be_used(exits: ExitStack) -> None:
    store = RedisStore(Forgetful(OfCluster("node")), "s")
    exits.callback(store.close)
    assert store.renew(leases(2), timeout=1.0) == [True, True]


def test_slot_that_has_moved_is_not_the_whole_map(exits: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread has forgotten the others meanwhile."""
    node = OfCluster("node")
    cluster = PlayedCluster(node)
    store = RedisStore(cluster, "s")
    exits.callback(store.close)
    first, second = leases(2)
    answers = iter([Exception(f"MOVED {key_slot(first.key.encode())} node:1")])

    def answer(command: Sequence[bytes], plain: Callable[..., bytes] = node.answer) -> bytes:
        if command[0] != b"EVALSHA" or (moved := next(answers, None)) is None:
            return plain(command)
        cluster._forget()
        return as_resp(moved)

    monkeypatch.setattr(node, "answer", answer)
    assert store.free(first)
    assert store.renew([second], timeout=1.0) == [True]


class TestLost:
    """A master of a cluster has lost the other nodes, which have replaced it; clients reach them all."""

    @pytest.fixture
    def store(self, exits: ExitStack) -> RedisStore:
        old, new = OfCluster("old"), OfCluster("new")
        store = RedisStore(PlayedCluster(old, new), "s")
        exits.callback(store.close)
        assert store.free(Hold(KEY, new_owner(), ttl=TTL))
        old.has_lost = True
        return store

    def test_look_finds_the_new_one(self, store: RedisStore) -> None:
        """A program may do nothing else."""
        assert store.held(KEY) == []

    def test_new_one_is_not_asked_about_what_it_was_not_told(self, store: RedisStore) -> None:
        """What is pending for the lock goes there first, although the old one has answered that."""
        store._pending.add(("free", KEY, "x"), lock_commands.free(Hold.of_nobody(KEY), record=RECORD), seconds=TTL)
        store.acquire(asked())
        names = {script.sha.encode(): script.name for script in (lock_commands.FREE, lock_commands.ACQUIRE)}
        new = store._servers.played["new", 1]._player.asked
        assert [names[command[1]] for command in new if command[0] == b"EVALSHA"] == ["lock/free", "lock/acquire"]

    def test_nodes_that_were_lost_with_it_are_not_asked_for_the_map_again_and_again(self, exits: ExitStack) -> None:
        """They come before the new one in the map, and in the URL."""
        nodes = [*(OfCluster(name, master="old") for name in ("first", "second", "old")), OfCluster("new")]
        store = RedisStore(PlayedCluster(*nodes), "s")
        exits.callback(store.close)
        assert store.free(Hold(KEY, new_owner(), ttl=TTL))
        nodes[2].has_lost = True
        assert isinstance(store.acquire(asked()), Lease)

    def test_node_of_the_url_that_is_gone_is_asked_for_the_map_once(self, exits: ExitStack) -> None:
        """That takes a second."""
        there = OfCluster("there")
        cluster = PlayedCluster(OfCluster("gone"), there)
        exits.callback(cluster.close)
        there.others = ()
        cluster.played["gone", 1].is_away = True
        for _ in range(3):
            cluster._forget()
            assert cluster._map()
        assert cluster.played["gone", 1].missed == 1

    def test_waiter_finds_the_new_one(self, store: RedisStore) -> None:
        wake_up = RedisWakeUp(KEY, lambda: store._servers.server_of(KEY), "s")
        assert wake_up.wait(0.01) is None
        assert store._servers.server_of(KEY)._address == ("new", 1)
        wake_up.__exit__(None, None, None)


class TestHalfOpen:
    """A firewall has forgotten the connections to the nodes of a Redlock: there is no answer, and no error."""

    @pytest.fixture
    def store(self, exits: ExitStack, monkeypatch: pytest.MonkeyPatch) -> RedlockStore:
        store = redlock(exits, [played() for _ in range(3)])
        with store._nodes.conversation() as talk:
            for each in talk._connections:
                assert each is not None
                each._socket.player = Silent()
        monkeypatch.setattr(conversation, "MUTE_FOR", 0.0)
        return store

    def test_call_opens_new_ones(self, store: RedlockStore) -> None:
        assert isinstance(store.acquire(asked(ttl=1.0)), Lease)

    def test_release_is_repeated_if_the_store_is_not_used_again(
        self, store: RedlockStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(conversation, "MUTE_FOR", TTL)
        with pytest.raises(LockUnavailable):
            store.free(Hold(KEY, new_owner(), ttl=1.0))
        monkeypatch.setattr(conversation, "MUTE_FOR", 0.0)
        monkeypatch.setattr(conversation, "_UNUSED", -1.0)
        assert not store._nodes._repeat()


@pytest.mark.parametrize("failed", [1, 2, 3])
def test_nodes_that_failed_a_moment_ago_are_asked_if_the_others_are_no_majority(exits: ExitStack, failed: int) -> None:
    servers = [played() for _ in range(3)]
    store = redlock(exits, servers)
    for each in store._nodes.each[:failed]:
        each.failed(ConnectionError("it hung"))
    assert isinstance(store.acquire(asked()), Lease)
    assert [server.opened for server in servers] == ([0, 1, 1] if failed == 1 else [1, 1, 1])


def held_by(owner: str) -> list[object]:
    """A vote's answer: nobody has a majority if each node names another owner, so that there are three attempts."""
    return [0, owner.encode() * 32 + b"[]", 500, 0]


class TestLate:
    """The next attempts name to a node those that it has not answered, which costs a key each."""

    @pytest.fixture(autouse=True)
    def all_are_heard(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """All answers are heard, not only those that decide."""
        ask = Conversation.ask
        monkeypatch.setattr(
            Conversation, "ask", lambda it, call, enough, **more: ask(it, call, lambda _: False, **more)
        )

    def votes(self, server: CountedServer) -> list[Sequence[bytes]]:
        asked = server._player.asked
        return [command for command in asked if command[1] == commands.VOTE.sha.encode()]

    def test_attempts_that_all_nodes_answered_are_not_named(self, exits: ExitStack) -> None:
        servers = [played({commands.VOTE: [held_by(owner)] * 3}) for owner in "abc"]
        store = redlock(exits, servers)
        assert isinstance(store.acquire(asked()), Held)
        votes = self.votes(servers[0])
        assert len(votes) == 3
        assert len({int(vote[2]) for vote in votes}) == 1, "no vote names more keys than the first"

    def test_attempts_that_a_node_has_not_answered_are_named(self, exits: ExitStack) -> None:
        servers = [played({commands.VOTE: [held_by(owner)] * 3}) for owner in "ab"]
        store = redlock(exits, [*servers, CountedServer(Deaf(commands.VOTE))])
        assert isinstance(store.acquire(asked(ttl=8.0)), Held)
        first, second, third = (int(vote[2]) for vote in self.votes(servers[0]))
        assert (second - first, third - first) == (1, 2)
