"""The commands of the comparison: well-formed and malformed ones, and the package's scripts, on a few keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from celery_singleton_lock.holder import Holder
from celery_singleton_lock.lease import Hold
from celery_singleton_lock.stores.base import LockRequest, Record, Reservation
from celery_singleton_lock.stores.redis import keyspace, lock_commands
from celery_singleton_lock.stores.redis.ledger import RedisLedger
from celery_singleton_lock.stores.redis.script import Call, Command
from celery_singleton_lock.stores.store import Place

PREFIX = "model"
LOCK = f"{PREFIX}:{{job:1}}"
BEAT = f"{PREFIX}:{{beat}}"

#: A waiter, with its mailbox.
MEMBER = f"{LOCK}:mail:{0:032x}|{0:032x}"

#: Long enough that nothing expires while a sequence is under way; expired keys get a time in the past.
TTLS = st.sampled_from([60.0, 90.0, 600.0])

OWNERS = st.integers(0, 3).map(lambda number: f"{number:028x}{number:04x}")
HOLDERS = st.builds(
    Holder,
    task_id=st.sampled_from(["t0", "t1", "t2"]),
    retries=st.integers(0, 1),
    node=st.just("w@host"),
    pid=st.just(7),
    since=st.sampled_from([0.0, 1700000000.25]),
    replaced=st.integers(0, 1),
)
LIMITS = st.sampled_from([1, 1, 2, 3])
RECORDS = st.builds(
    Record,
    st.none(),
    st.sampled_from([b"", b"done", b"?done", b"60", b'["SUCCESS", 1]\r\n\xff']),
    TTLS,
)
REQUESTS = st.builds(
    LockRequest,
    key=st.just(LOCK),
    owner=OWNERS,
    ttl=TTLS,
    holder=HOLDERS,
    waiting=st.booleans(),
    check_finished=st.booleans(),
    limit=LIMITS,
    given_up=st.lists(OWNERS, max_size=2).map(tuple),
    late=st.booleans(),
    since=st.sampled_from([1.0, 2.0]),
    member=st.just(MEMBER),
)
HOLDS = st.builds(lambda owner, ttl, limit: Hold(LOCK, owner, ttl=ttl, limit=limit), OWNERS, TTLS, LIMITS)


def _of(holder: Holder, record: Record | None) -> Record | None:
    return record and record._replace(message=holder.message)


@st.composite
def _endings(draw: Any) -> Call:
    hold, holder = draw(HOLDS), draw(HOLDERS)
    record = _of(holder, draw(st.none() | RECORDS))
    reservation = draw(st.none() | st.builds(Reservation, HOLDERS, TTLS))
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return lock_commands.abandon(hold)
    if kind == 1:
        return lock_commands.free(hold, record=record, reservation=reservation, for_good=True)
    call = lock_commands.free(hold, record=record, reservation=reservation)
    return call.again() if draw(st.booleans()) else call


@st.composite
def _refusals(draw: Any) -> Call:
    holder = draw(HOLDERS)
    record = _of(holder, draw(RECORDS))
    assert record is not None
    refuse = lock_commands.refuse(LOCK, holder, record)
    return draw(st.sampled_from([refuse, lock_commands.take_back(LOCK, record)]))


@st.composite
def _votes(draw: Any) -> Call:
    request, memory = draw(REQUESTS), draw(st.sampled_from([None, f"{PREFIX}:{{job:1}}:memory"]))
    return lock_commands.vote(replace(request, limit=1), memory=memory)


ENTRIES, LAST_RUNS = ["e0", "e1", "e2:run"], [0, 5, 10, 10**15]
LASTS = st.dictionaries(st.sampled_from(ENTRIES), st.sampled_from(LAST_RUNS), min_size=1)
CEILINGS = st.sampled_from([7, 10**16])
LOCK_CALLS = st.one_of(
    st.builds(lock_commands.acquire, REQUESTS),
    st.builds(
        lambda since, copies, limit: lock_commands.look(Place(LOCK, "0" * 32, since, copies, limit), MEMBER),
        st.sampled_from([1.0, 2.0]),
        st.sampled_from([1, 5]),
        LIMITS,
    ),
    st.builds(
        lambda leaves, wakes: lock_commands.next_waiter(LOCK, leaves, wakes=wakes),
        st.sampled_from(["", MEMBER]),
        st.booleans(),
    ),
    st.just(lock_commands.push(MEMBER)),
    _endings(),
    _endings(),
    _refusals(),
    _votes(),
    st.lists(HOLDS, min_size=1, max_size=3).map(lambda holds: lock_commands.renew(holds, {it: it.ttl for it in holds})),
    st.lists(HOLDS, min_size=1, max_size=3).map(lock_commands.values),
    st.lists(HOLDS, min_size=1, max_size=3).map(
        lambda holds: lock_commands.put_back(holds, {holds[0]: b"0" * 32 + b"[]"})
    ),
    st.builds(
        lambda owner, fence: lock_commands.raise_fence(LOCK, owner, fence=fence),
        OWNERS,
        st.sampled_from([1, 10**17]),
    ),
    st.lists(st.tuples(HOLDERS, RECORDS), min_size=1, max_size=3).map(
        lambda pairs: lock_commands.replace_records([(LOCK, _of(holder, record)) for holder, record in pairs])  # type: ignore[misc]
    ),
)


class _Asked(Exception):
    """Raised instead of asking a server: the call that it would have got."""


def _ask(call: Call) -> Any:
    raise _Asked(call)


def _first_call(use: Callable[[], object]) -> Call:
    """The first call in a use of the ledger."""
    try:
        use()
    except _Asked as asked:
        call: Call = asked.args[0]
        return call
    raise AssertionError("nothing was asked")


def _of_ledger(use: Callable[[RedisLedger], object], known: Sequence[str] = ()) -> Call:
    ledger = RedisLedger(BEAT, _ask, lambda: [(entry.encode(), 0) for entry in known])
    return _first_call(lambda: use(ledger))


BEAT_CALLS = st.one_of(
    st.builds(lambda lasts, ceiling: _of_ledger(lambda it: it.align(lasts, ceiling=ceiling)), LASTS, CEILINGS),
    st.builds(
        lambda entry, last, owner, ttl, ceiling: _of_ledger(
            lambda it: it.claim(entry, last, owner, ttl=ttl, ceiling=ceiling)
        ),
        st.sampled_from(ENTRIES),
        st.sampled_from(LAST_RUNS),
        OWNERS,
        TTLS,
        CEILINGS,
    ),
    st.builds(
        lambda lasts, owner, ceiling: _of_ledger(lambda it: it.record(lasts, owner, ceiling=ceiling)),
        LASTS,
        OWNERS,
        CEILINGS,
    ),
    st.builds(lambda lasts, owner: _of_ledger(lambda it: it.unclaim(list(lasts), owner)), LASTS, OWNERS),
    LASTS.map(lambda lasts: _of_ledger(lambda it: it.align({}, ceiling=0), known=list(lasts))),
)

#: Keys for plain commands; the package's own keys are among them, so that its scripts meet foreign values.
FREE_KEYS = {"text": "k{1}", "list": "l{1}", "hash": "h{1}", "scores": "z{1}"}
OWN_KEYS = [
    keyspace.run_key(LOCK),
    LOCK + keyspace.FENCE,
    LOCK + keyspace.WAITING,
    LOCK + keyspace.ASKED,
    LOCK + keyspace.DONE + "t0:0.0",
    LOCK + keyspace.TOMBSTONE + f"{0:032x}",
    BEAT + keyspace.LEDGER,
    *keyspace.claim_keys(BEAT, ["e0"]),
]
KEYS = st.sampled_from([*[*FREE_KEYS.values()] * 12, *OWN_KEYS])


def _mostly(kind: str) -> st.SearchStrategy[str]:
    """Keys that mostly have a value of this kind."""
    return st.sampled_from([*[FREE_KEYS[kind]] * 40, *[*FREE_KEYS.values()] * 2, *OWN_KEYS])


TEXTS, LISTS, HASHES, SCORED = map(_mostly, FREE_KEYS)
VALUES = st.sampled_from(
    [b"", b"a", b"b", b"1", b"-5", b"2", b"9223372036854775807", b"3.5", b" 1", b"01", b"\r\n\0\xff"]
)
NUMBERS = st.sampled_from([0, 1, -1, 2, -2, 5, 100, -100, "x", "1.5", "", "+1", "9223372036854775807", "-0"])
SCORES = st.sampled_from([0, 1, -1.5, 2, "inf", "-inf", "nan", "x", "1e3", "0x10", "(1", "(2", "", "+3", ".5", "5."])
FOREVER_AND_LONG = st.sampled_from([60_000, 600_000, 10**15])
PAST = st.sampled_from([0, -1, -(10**12), "x", "9223372036854775807"])


def _words(*parts: Any) -> st.SearchStrategy[Command]:
    return st.tuples(*(part if isinstance(part, st.SearchStrategy) else st.just(part) for part in parts))


PLAIN = st.one_of(
    _words("GET", TEXTS),
    _words("SET", TEXTS, VALUES),
    _words("SET", TEXTS, VALUES, st.sampled_from(["NX", "XX", "KEEPTTL", "GET", "what"])),
    _words("SET", TEXTS, VALUES, "PX", FOREVER_AND_LONG | PAST),
    _words("SET", TEXTS, VALUES, "px", FOREVER_AND_LONG, st.sampled_from(["NX", "XX", "EX", "GET"])),
    _words("SET", TEXTS, VALUES, "EX", st.sampled_from([60, 0, -1, "9223372036854775807"])),
    _words("GETRANGE", TEXTS, NUMBERS, NUMBERS),
    _words("EXISTS", KEYS, KEYS),
    _words("DEL", KEYS),
    _words("DEL", KEYS, KEYS),
    _words("TYPE", KEYS),
    _words("PTTL", KEYS),
    _words("PEXPIRE", KEYS, FOREVER_AND_LONG | PAST),
    _words("PEXPIREAT", KEYS, st.sampled_from([-1, 0, 1, "x", 4_000_000_000_000])),
    _words("RPUSH", LISTS, VALUES),
    _words("RPUSH", LISTS, VALUES, VALUES),
    _words("LTRIM", LISTS, NUMBERS, NUMBERS),
    _words("HSET", HASHES, VALUES, VALUES),
    _words("HSET", HASHES, VALUES, VALUES, VALUES),
    _words("HSET", HASHES, VALUES, VALUES, VALUES, VALUES),
    _words("HGET", HASHES, VALUES),
    _words("HGETALL", HASHES),
    _words("HVALS", HASHES),
    _words("HDEL", HASHES, VALUES, VALUES),
    _words("HLEN", HASHES),
    _words("HSCAN", HASHES, 0),
    _words("HSCAN", HASHES, 0, "MATCH", st.sampled_from(["*", "a", "?", "?*"])),
    _words("ZADD", SCORED, SCORES, VALUES),
    _words("ZADD", SCORED, SCORES, VALUES, SCORES, VALUES),
    _words("ZADD", SCORED, st.sampled_from(["XX", "NX"]), SCORES, VALUES),
    _words("ZSCORE", SCORED, VALUES),
    _words("ZRANGE", SCORED, NUMBERS, NUMBERS),
    _words("ZRANGE", SCORED, 0, -1, "WITHSCORES"),
    _words("ZREM", SCORED, VALUES, VALUES),
    _words("ZRANGEBYSCORE", SCORED, SCORES, SCORES),
    _words("ZRANGEBYSCORE", SCORED, SCORES, SCORES, "LIMIT", NUMBERS, NUMBERS),
    _words("ZREMRANGEBYSCORE", SCORED, SCORES, SCORES),
    _words("ZREMRANGEBYRANK", SCORED, NUMBERS, NUMBERS),
    _words("SCAN", 0, "COUNT", 1000),
    _words("SCAN", 0, "MATCH", st.sampled_from(["k*", "*run*", f"{PREFIX}:*:run*", "?{?}", "\\k*"]), "COUNT", 1000),
    _words("ASKING"),
    _words("SCRIPT", "EXISTS", "0" * 40, lock_commands.ACQUIRE.sha),
    _words("EVALSHA", st.sampled_from(["0" * 40, lock_commands.RENEW.sha, lock_commands.RENEW.sha.upper()]), 0),
    _words("GET"),
    _words("SET", TEXTS),
    _words("PTTL", KEYS, KEYS),
)

#: Scripts that handle numbers, answers and errors; ARGV[1] is a word, the rest are a command.
SNIPPETS = st.sampled_from(
    [
        "return redis.call(unpack(ARGV, 2))",
        "local answer = redis.call(unpack(ARGV, 2)) return answer",
        "local answer = redis.pcall(unpack(ARGV, 2)) return answer",
        "local answer = redis.pcall(unpack(ARGV, 2)) return type(answer)",
        "local answer = redis.pcall(unpack(ARGV, 2)) return type(answer) == 'table' and (answer.err or answer.ok)",
        "local answer = {redis.pcall(unpack(ARGV, 2)), redis.pcall('EXISTS', KEYS[1])} return answer",
        "redis.call('SET', KEYS[1], ARGV[1]) local answer = redis.call(unpack(ARGV, 2)) return answer",
        "return {1.9, -1.9, 2^40, 1e15, true, 'x', {ok = 'fine'}, {err = 'ERR bad'}, {{}, {1}}, false, 5}",
        "return {1, nil, 3}",
        "return {false, 1}",
        "return nil",
        "return 'text'",
        "return redis.status_reply('GOOD')",
        "return redis.error_reply('BAD thing')",
        "return redis.error_reply('BAD')",
        "return {err = 'MINE own'}",
        "return {err = '\\r\\nMINE\\r\\nown\\r\\n'}",
        "return {{err = 'MINE own\\n'}}",
        "return {ok = 'FINE\\r\\n'}",
        "return redis.sha1hex(ARGV[1])",
        "return {type(redis.call('GET', 'no{1}')), type(redis.call('TYPE', 'no{1}')), redis.call('TYPE', 'no{1}').ok}",
        "redis.call('SET', KEYS[1], 3.5) return redis.call('GET', KEYS[1])",
        "redis.call('SET', KEYS[1], 2^53) return redis.call('GET', KEYS[1])",
        "redis.call('SET', KEYS[1], 1e17) return redis.call('GET', KEYS[1])",
        "redis.call('SET', KEYS[1], 0.1) return redis.call('GET', KEYS[1])",
        "redis.call('SET', KEYS[1], true)",
        "redis.call('SET', KEYS[1], {})",
        "redis.call()",
        "redis.call('GET')",
        "return redis.pcall('GET')",
        "redis.call('EVAL', 'return 1', 0)",
        "error('x')",
        "error('x', 0)",
        "local x = nil + 1",
        "local x = {} .. 'a'",
        "return nosuchglobal",
        "global = 1",
        "local function f() error('deep') end\nf()",
        "\n\nredis.call('GET', KEYS[1], 1)",
        "local found = {} for i, text in ipairs({'[1', '{}', 'null', ' true', '', '-1.5e2', '[1,]', 'x', '{1:2}'}) do "
        "local ok, value = pcall(cjson.decode, text) found[i] = ok and type(value) end return found",
        'local fields = cjson.decode(\'[1, "a", null, true, {"b": [2.5]}]\') '
        "return {fields[1], fields[2], fields[3] == cjson.null, fields[4], fields[5].b[1] * 2, #fields}",
        "return cjson.decode('\"\\u00e9\\u20ac\"')",
        "return x y",
        "return math.max(tonumber(ARGV[1]) or 0, 1)",
        "return {KEYS[1], ARGV[1], #KEYS}",
        "return redis.call('BLPOP', KEYS[1], 0)",
    ]
)
SCRIPTED = st.builds(
    lambda text, key, word, command: ("EVAL", text, 1, key, word, *command), SNIPPETS, KEYS, VALUES, PLAIN
)


def _asked(call: Call, way: int) -> Sequence[Command]:
    """A call as it is sent, with longer times to live, so that nothing expires."""
    call = call._replace(args=[60_000 if arg in (1000, 6000) else arg for arg in call.args])
    return [[call.by_text], [call.by_digest], [("SCRIPT", "LOAD", call.script.text), call.by_digest]][way]


CALLS = st.builds(_asked, LOCK_CALLS | BEAT_CALLS, st.sampled_from([0, 0, 0, 1, 2]))
#: A process that waits for what comes into its mailbox.
WAITS = st.just([("BLPOP", MEMBER.partition("|")[0], 0)])
POPS = st.one_of(
    _words("BLPOP", LISTS, 0).map(lambda words: [words]),
    _words("BLPOP", TEXTS.filter(lambda key: key != FREE_KEYS["text"]), LISTS, 0).map(lambda words: [words]),
    _words("BLPOP", LISTS, "0.002").map(lambda words: [words]),
    _words("BLPOP", LISTS, st.sampled_from([-1, "x", ""])).map(lambda words: [words]),
)
SINGLE = st.one_of(PLAIN, PLAIN, SCRIPTED).map(lambda command: [command])
#: The commands that a client sends at once.
SENT = st.lists(st.one_of(SINGLE, SINGLE, CALLS, CALLS, CALLS, WAITS, POPS), min_size=1, max_size=3).map(
    lambda parts: [command for part in parts for command in part]
)
#: Keys that have expired when the next step begins.
SHORT = st.one_of(
    _words("SET", KEYS, VALUES, "PX", 1),
    _words("PEXPIRE", KEYS, 1),
)
SENT = st.one_of(SENT, SENT, SENT, st.builds(lambda commands, last: [*commands, last], SENT, SHORT))
STEPS = st.tuples(st.integers(0, 3), SENT)
SEQUENCES = st.lists(STEPS, min_size=1, max_size=15)

#: Waiters for one lock and one list, and the commands that wake them.
HAND_OVERS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.lists(
            st.one_of(
                WAITS,
                st.sampled_from([[("BLPOP", "l{1}", 0), ("GET", "k{1}")], [("BLPOP", "q{1}", "l{1}", 0)]]),
                st.sampled_from([[("RPUSH", "l{1}", 1)], [("RPUSH", "l{1}", 1, 2, 3)], [("SET", "k{1}", 1)]]),
                st.builds(_asked, st.builds(lock_commands.push, st.just(MEMBER)), st.just(0)),
                st.builds(_asked, st.builds(lock_commands.free, HOLDS), st.just(0)),
                st.builds(_asked, st.builds(lock_commands.acquire, REQUESTS), st.just(0)),
                st.just(
                    [("EVAL", "redis.call('RPUSH', KEYS[1], 1, 2, 3) redis.call('LTRIM', KEYS[1], -2, -1)", 1, "l{1}")]
                ),
            ),
            min_size=1,
            max_size=2,
        ).map(lambda parts: [command for part in parts for command in part]),
    ),
    min_size=4,
    max_size=20,
)
