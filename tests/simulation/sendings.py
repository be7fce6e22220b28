"""Plans of messages that have a lock while they wait: which clients send them, which die, which messages are lost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from tests.simulation.apps import REPLACES, SENT, words_of
from tests.simulation.plan import KINDS, Fault, Message, Plan, Shape, one_of

#: Faults of messages, their senders and the workers that start them, with weights and longest durations in seconds.
OF_SENDING: dict[str, tuple[float, float]] = {
    "sender dies": (3, 1.0),
    "sender dies before it sends": (3, 1.0),
    "sender dies as it has sent": (4, 1.0),
    "sender cut": (2, 6.0),
    "sender cut back": (3, 6.0),
    "sender cut there": (2, 6.0),
    "sender slow": (2, 4.0),
    "sending refused": (3, 2.0),
    "sending unheard": (3, 2.0),
    "sending slow": (2, 40.0),
    "queue purged": (2, 0.0),
    "message lost": (2, 0.0),
    "revoked": (3, 0.0),
    "child killed at a start": (3, 1.5),
    "worker killed at a start": (4, 1.5),
    "locks of messages cleared": (1, 0.0),
}

#: Faults by which a message, but not its lock, is lost: a follower waits for the expiry of the lock.
LOSES = ("queue purged", "message lost", "worker killed", "worker killed at a start")

#: Faults of `KINDS` that also strike such messages.
OF_WORKERS = (
    *("child killed", "worker killed", "child stopped", "worker stopped", "server stalled", "server restarted"),
    *("cut there", "cut back", "slow", "delivered again", "acknowledgement lost", "broker cut"),
)

#: Share of the plans in which a newer message takes the place of one that waits.
REPLACE = 0.15

#: Seconds after everything until each job is sent once more: by then, leftovers have expired.
AGAIN = 32.0


def draw_sent(seed: int, _: int | None) -> Plan:
    """The plan of a seed."""
    rng = random.Random(f"sent by {seed}")
    if random.Random(f"replaces by {seed}").random() < REPLACE:
        return _and_again(one_of((takes_its_place,), bare(seed, rng, "sent", (3.0, 6.0)), rng), rng)
    return _and_again(one_of(SHAPES, bare(seed, rng, "sent", (3.0, 6.0)), rng), rng)


def bare(seed: int, rng: random.Random, kind: str, ttls: Sequence[float]) -> Plan:
    """A plan of workers and locks in which nothing is sent and nothing goes wrong."""
    ttl = rng.choice(ttls)
    return Plan(
        seed,
        rng.choice(("prefork", "prefork", "threads")),
        1,
        rng.choice((1, 2, 2)),
        rng.choice((1, 2)),
        ttl,
        rng.choice((2 * ttl, 4 * ttl, 60.0)),
        rng.choice((15.0, 60.0, 200.0)),
        (),
        (),
        kind=kind,
    )


def anything(plan: Plan, rng: random.Random) -> Plan:
    """Some jobs are sent over and over, with any faults."""
    tasks = rng.choice([(task,) for task in SENT] + [tuple(SENT)])
    until = rng.uniform(1.0, 2.5 * plan.ttl)
    messages = tuple(
        Message(
            round(rng.choice((rng.uniform(0.05, until), 0.1)), 3),
            rng.choice(tasks),
            rng.choice("aaab"),
            number,
            _words(rng, plan.ttl),
            chained=rng.random() < 0.15,
            sent=_how(rng),
        )
        for number in range(rng.randint(3, 7))
    )
    faults = _faults(plan, rng, until, of_sending=(0, 1, 1, 2, 3), of_workers=(0, 0, 1, 2))
    may_be_lost = any(message.chained for message in messages) and any(fault.kind in LOSES for fault in faults)
    return with_sent(plan, messages, faults, queue_ttl=20.0 if may_be_lost else rng.choice((None, None, 20.0)))


def sender_is_gone(plan: Plan, rng: random.Random) -> Plan:
    """Only a worker can confirm a lock, or only the sender."""
    task = rng.choice(("shop.once", "shop.once_early", "shop.waits", "shop.behind"))
    due = rng.choice(("", "countdown=36"))
    messages = _at(rng, task, (0.1, 0.4, 3.0, 33.0), f"takes={rng.choice((0.1, 1.0))}", sent=due)
    if due:
        faults = [Fault(0.05, "sender dies as it has sent", 0, 0.5)]
    else:
        faults = [Fault(0.02, "worker killed", number, 40.0) for number in range(plan.workers)]
    return with_sent(plan, messages, faults)


def begins_and_dies(plan: Plan, rng: random.Random) -> Plan:
    """The worker dies soon after a body has begun, or a while later."""
    task = rng.choice(("shop.once_early", "shop.once_early", "shop.once", "shop.behind_early", "shop.waits_early"))
    times = (0.1, 0.2, 2.0, 0.1 + 2.0 * plan.ttl, 0.1 + 3.0 * plan.ttl)
    takes = f"takes={rng.choice((1.0, 3.0, 2 * plan.ttl))}"
    kind = rng.choice(("worker killed at a start", "child killed at a start"))
    if kind == "child killed at a start":
        plan = replace(plan, pool="prefork")
    faults = [Fault(0.05, kind, 0, round(rng.choice((rng.uniform(0.0, 0.3), rng.uniform(0.8, 2.5))), 3))]
    return with_sent(plan, _at(rng, task, times, takes), faults)


def tries_again(plan: Plan, rng: random.Random) -> Plan:
    """Retries follow each other while others send the job."""
    task = rng.choice(("shop.once", "shop.once_early", "shop.waits", "shop.behind"))
    countdown = rng.choice((0, 0.5, 1.5 * plan.ttl))
    words = f"takes={rng.choice((0.1, 0.5))} retries={rng.randint(1, 2)} countdown={countdown}"
    times = sorted(round(0.1 + rng.uniform(0.0, 2.0 * countdown + 2.0), 3) for _ in range(5))
    faults = [Fault(round(rng.uniform(0.2, 3.0), 3), "delivered again", rng.randrange(100)) for _ in range(2)]
    return with_sent(plan, _at(rng, task, (0.05, *times), words), faults)


def waits_for_its_turn(plan: Plan, rng: random.Random) -> Plan:
    """A running message keeps waiting ones off: they wait without locks, or behind it."""
    task = rng.choice(("shop.behind", "shop.behind", "shop.behind_early", "shop.once"))
    times = tuple(round(0.1 + rng.choice((0.1, 0.4, 0.9)) * number, 3) for number in range(6))
    messages = _at(rng, task, times, f"takes={round(rng.uniform(0.5, 1.5) * plan.ttl, 2):g}", chained=0.4)
    faults = [
        Fault(round(rng.uniform(0.2, 3.0), 3), rng.choice(("delivered again", "broker cut")), rng.randrange(9), 0.5)
    ]
    return with_sent(plan, messages, faults[: rng.randint(0, 1)])


def ends_without_a_body(plan: Plan, rng: random.Random) -> Plan:
    """A message is revoked, expires or is skipped while it waits behind a long one."""
    task = rng.choice(("shop.once", "shop.waits", "shop.behind", "shop.once_early", "shop.behind_early"))
    how = rng.choice(("", "expires=1.5", "countdown=2", "expires=4 countdown=1"))
    first = Message(0.05, task, "b", 0, f"takes={round(rng.uniform(1.0, 5.0), 2):g}")
    rest = _at(rng, task, (0.2, 0.5, 3.0, 6.0, 9.0), "takes=0.2", sent=how, first=1)
    faults = [Fault(round(rng.uniform(0.3, 2.0), 3), "revoked", rng.randrange(100)) for _ in range(rng.randint(0, 2))]
    return with_sent(replace(plan, workers=1, concurrency=1), (first, *rest), faults)


def not_as_far_as_it_knows(plan: Plan, rng: random.Random) -> Plan:
    """The broker has a message whose sender got an error; the next sender dies before it sends."""
    task = rng.choice(("shop.once", "shop.waits", "shop.behind"))
    messages = _at(rng, task, (0.1, 0.3, 0.6, 4.0), "takes=0.3", sent=rng.choice(("", "countdown=1")))
    kind = rng.choice(("sending unheard", "sending unheard", "sending refused", "sending slow"))
    faults = [Fault(0.05, kind, 0, 0.1 if kind != "sending slow" else rng.choice((1.0, 31.0)))]
    if rng.random() < 0.6:
        faults.append(Fault(0.2, "sender dies before it sends", 0, 0.3))
    return with_sent(plan, messages, faults)


def copied_headers(plan: Plan, rng: random.Random) -> Plan:
    """A message has the headers of another one, whose lock it does not have."""
    task = rng.choice(("shop.once", "shop.once", "shop.once_early", "shop.waits"))
    first = Message(
        0.1, task, "a", 0, f"takes={round(rng.uniform(1.0, 2 * plan.ttl), 2):g}", sent=rng.choice(("", "countdown=2"))
    )
    copy = Message(0.4, task, "b", 1, "takes=0.1", sent="copies=m0")
    return with_sent(replace(plan, concurrency=2), (first, copy, *_at(rng, task, (1.0, 2.0), "takes=0.1", first=2)), [])


def answered_unheard(plan: Plan, rng: random.Random) -> Plan:
    """A worker gets the lock of a run and does not hear that, for so long that it puts its message back; another worker
    gets the message while the lock is still held.
    """
    task = rng.choice(("shop.once_early", "shop.behind_early", "shop.once_early", "shop.once", "shop.behind"))
    # On a new connection, the greeting would not be heard.
    before = [Message(at, task, key, number, "takes=0") for number, (at, key) in enumerate(((0.05, "b"), (0.1, "c")))]
    asks = round(rng.uniform(0.5, 1.0), 3)
    message = Message(asks, task, "a", 2, f"takes={rng.choice((0.1, 1.0))}", chained=rng.random() < 0.3)
    silent = Fault(round(asks - 0.01, 3), "cut back", rng.choice((0, 0, 0, 1)), round(rng.uniform(3.5, 6.5), 3))
    plan = replace(plan, ttl=rng.choice((6.0, 10.0)), workers=2, concurrency=1, visibility=60.0, in_turns=True)
    return with_sent(plan, (*before, message), [silent])


def takes_its_place(plan: Plan, rng: random.Random) -> Plan:
    """Messages are sent while an older one waits, which is due later, or begins just then."""
    task = rng.choice(tuple(REPLACES))
    latency = round(rng.choice((0.0, 0.0, 0.01, 0.03)) * plan.ttl, 4)
    until = rng.choice((0.5, 2.0, 4.0))
    messages = tuple(
        Message(
            round(rng.uniform(0.05, until), 3), task, rng.choice("aaab"), number,
            f"takes={rng.choice((0.1, 0.5, 2.0))}",
            sent=rng.choice(("", "", "countdown=1", f"countdown={round(rng.uniform(0.5, 5.0), 2):g}")),
        )
        for number in range(rng.randint(3, 7))
    )  # fmt: skip
    kinds = ("sender dies as it has sent", "sender dies before it sends", "sender cut back", "sending unheard")
    kinds = (*kinds, "delivered again", "delivered again", "child killed at a start", "wall clock set", "message lost")
    faults = [
        Fault(round(rng.uniform(0.05, until), 3), rng.choice(kinds), rng.randrange(9), round(rng.uniform(0.1, 3.0), 3))
        for _ in range(rng.choice((0, 0, 1, 1, 2)))
    ]
    return with_sent(replace(plan, latency=latency), messages, faults)


def parts_of_canvas(plan: Plan, rng: random.Random) -> Plan:
    """Several steps of a canvas are sent while a message waits or runs: they end as that message."""
    tasks = rng.choice([(task,) for task in FOLLOWED])
    until = rng.uniform(0.5, 1.5 * plan.ttl)
    messages = tuple(
        Message(
            round(rng.choice((rng.uniform(0.05, until), 0.1)), 3), rng.choice(tasks), rng.choice("aaab"), number,
            _words(rng, plan.ttl), chained=rng.random() < 0.7, sent=_how(rng),
        )
        for number in range(rng.randint(3, 7))
    )  # fmt: skip
    faults = _faults(plan, rng, until, of_sending=(0, 0, 1, 1, 2), of_workers=(0, 0, 1))
    return with_sent(plan, messages, faults)


def leader_is_gone(plan: Plan, rng: random.Random) -> Plan:
    """The message that has the lock is lost, dies or is revoked, and so may be the message that runs in its place."""
    task = rng.choice(FOLLOWED)
    due = rng.choice(("", "", "countdown=2"))
    words = f"takes={rng.choice((0.5, 2.0))}{rng.choice(('', '', ' fails=1'))}"
    first = Message(0.1, task, "a", 0, words, sent=due)
    rest = _at(rng, task, sorted(round(rng.uniform(0.15, 1.5), 3) for _ in "1234"), words, chained=0.9, first=1)
    kinds = ("message lost", "queue purged", "revoked", "child killed at a start", "worker killed at a start")
    kinds = (*kinds, "sender dies before it sends", "sender dies as it has sent", "child killed")
    faults = [
        Fault(round(rng.choice((0.05, rng.uniform(0.12, 3.0))), 3), rng.choice(kinds), rng.randrange(9),
              round(rng.uniform(0.0, 1.0), 3))
        for _ in range(rng.choice((1, 1, 2, 3)))
    ]  # fmt: skip
    if rng.random() < 0.4:  # So the broker still has the message when it is lost.
        faults += [Fault(0.02, "worker killed", number, round(rng.uniform(1.0, 4.0), 2)) for number in (0, 1)]
    latency = round(rng.choice((0.0, 0.0, 0.02)) * plan.ttl, 4)
    return with_sent(replace(plan, workers=rng.choice((1, 2)), latency=latency), (first, *rest), faults)


def leader_waits(plan: Plan, rng: random.Random) -> Plan:
    """Followers wait in line for a leader that is due later, and then for the end of its run."""
    task = rng.choice(FOLLOWED)
    first = Message(0.1, task, "a", 0, f"takes={rng.choice((0.5, 3.0))}", sent=f"countdown={rng.choice((1.5, 3))}")
    rest = _at(rng, task, sorted(round(rng.uniform(0.15, 1.4), 3) for _ in "12345"), "takes=0.3", chained=0.9, first=1)
    kinds = ("delivered again", "revoked", "child killed", "broker cut")
    faults = [Fault(round(rng.uniform(0.5, 4.0), 3), rng.choice(kinds), rng.randrange(9), 0.5)]
    return with_sent(replace(plan, concurrency=2), (first, *rest), faults[: rng.randint(0, 1)])


def leader_begins_meanwhile(plan: Plan, rng: random.Random) -> Plan:
    """Each message to the lock server takes long: followers look when the leader begins or ends."""
    task = rng.choice(FOLLOWED)
    latency = round(rng.choice((0.01, 0.03)) * plan.ttl, 4)
    takes = rng.choice((0.1, 0.3, 1.0))
    begins = rng.choice((0.1, 0.7))
    # They look when the leader, which is due just then, begins, or when its run ends.
    looks = rng.choice((begins, begins + takes))
    times = [max(round(looks + rng.uniform(-8.0, 4.0) * latency, 3), 0.11) for _ in "1234"[: rng.randint(2, 4)]]
    words = f"takes={takes}{rng.choice(('', '', ' large=1', ' retries=1 countdown=0.5'))}"
    faults = [Fault(0.05, "results slow", 0, 4.0)] if rng.random() < 0.3 else []
    faults += [
        Fault(round(rng.uniform(0.1, 2.0), 3), "delivered again", rng.randrange(9))
        for _ in range(rng.choice((0, 1, 2)))
    ]
    due = "" if begins == 0.1 else f"countdown={begins - 0.1:g}"
    messages = (Message(0.1, task, "a", 0, words, sent=due), *_at(rng, task, times, words, chained=0.8, first=1))
    return replace(with_sent(plan, messages, faults), latency=latency, workers=2)


def leader_ends_meanwhile(plan: Plan, rng: random.Random) -> Plan:
    """Two workers come back one after the other, and the leader turns out to be revoked. The first worker is far from
    the lock server: while a follower there is about to take the leader's place, one on the other worker takes it, and
    begins.
    """
    task = rng.choice(("shop.waits", "shop.waits_early", "shop.behind", "shop.behind_early"))
    latency = round(rng.choice((0.01, 0.02, 0.03)) * plan.ttl, 4)
    first = Message(0.1, task, "a", 0, "takes=0.1")
    # The first worker takes four messages.
    times = sorted(round(rng.uniform(0.5, 1.0), 3) for _ in "12345")
    rest = _at(rng, task, times, f"takes={rng.choice((0.1, 0.5))}", chained=1.0, first=1)
    faults = [Fault(0.0, "far", 0), Fault(0.0, "near", 1), Fault(1.5, "revoked")]
    faults += [
        Fault(0.02, "worker killed", number, round(2.0 + late * latency, 3))
        for number, late in enumerate((0.0, rng.uniform(8.0, 11.0)))
    ]
    plan = replace(plan, latency=latency, workers=2, concurrency=2, visibility=60.0, in_turns=True)
    return with_sent(plan, (first, *rest), faults)


#: Tasks whose messages are followed.
FOLLOWED = (
    *("shop.once", "shop.once", "shop.once_early", "shop.waits", "shop.waits_early", "shop.behind", "shop.each"),
    "shop.behind_early",
)

IN_CANVAS: tuple[Shape, ...] = (
    *(parts_of_canvas, parts_of_canvas, leader_is_gone, leader_waits, leader_begins_meanwhile, leader_ends_meanwhile),
)


def in_canvas(plan: Plan, rng: random.Random) -> Plan:
    """A plan of canvas parts that find the lock of another message when they are sent."""
    # A follower of a lost message waits for the expiry of its lock.
    return _and_again(replace(one_of(IN_CANVAS, plan, rng), queue_ttl=20.0), rng)


SHAPES: tuple[Shape, ...] = (
    *(anything, anything, anything, sender_is_gone, begins_and_dies, begins_and_dies, tries_again, waits_for_its_turn),
    *(ends_without_a_body, not_as_far_as_it_knows, copied_headers, answered_unheard),
)


def _and_again(plan: Plan, rng: random.Random) -> Plan:
    """At the end, send each job once more: what matters to people is that nothing keeps it from being sent."""
    if rng.random() < 0.5:
        return plan
    jobs = sorted({(message.task, message.key) for message in plan.messages})
    first = max(message.number for message in plan.messages) + 1
    longest = max(float(words_of(message.sent).get("countdown", 0)) for message in plan.messages)
    at = round(plan.calm_at + longest + AGAIN + 2 * plan.ttl, 3)
    again = tuple(Message(at, task, key, first + place, "takes=0.1") for place, (task, key) in enumerate(jobs))
    return replace(plan, messages=(*plan.messages, *again))


def _at(
    rng: random.Random, task: str, times: Sequence[float], words: str, *, sent: str = "", chained: float = 0.0,
    first: int = 0,
) -> tuple[Message, ...]:  # fmt: skip
    return tuple(
        Message(at, task, "a", number, words, chained=rng.random() < chained, sent=sent)
        for number, at in enumerate(times, first)
    )


def with_sent(plan: Plan, messages: Sequence[Message], faults: Sequence[Fault], queue_ttl: float | None = None) -> Plan:
    """The plan with these messages and faults."""
    in_order = tuple(sorted(faults, key=lambda fault: fault.at))
    return replace(plan, messages=tuple(messages), faults=in_order, queue_ttl=queue_ttl)


def _words(rng: random.Random, ttl: float) -> str:
    words = [f"takes={round(rng.choice((0.0, 0.1, 0.5, rng.uniform(0, 1.5 * ttl))), 2)}"]
    if rng.random() < 0.1:
        words.append("fails=1")
    if rng.random() < 0.2:
        words.append(f"retries=1 countdown={rng.choice((0, 0.3, 2))}")
    return " ".join(words)


def _how(rng: random.Random) -> str:
    words = []
    if rng.random() < 0.15:
        words.append(f"countdown={rng.choice((0.5, 3.0))}")
    if rng.random() < 0.1:
        words.append(f"expires={rng.choice((0.5, 4.0))}")
    return " ".join(words)


def _faults(
    plan: Plan, rng: random.Random, until: float, *, of_sending: Sequence[int], of_workers: Sequence[int]
) -> list[Fault]:
    """So many faults of each sort, as chance says."""
    kinds = {kind: (weight, longest * plan.ttl) for kind, (weight, longest) in KINDS.items() if kind in OF_WORKERS}
    of_senders = [_fault(rng, OF_SENDING, until) for _ in range(rng.choice(of_sending))]
    return of_senders + [_fault(rng, kinds, until) for _ in range(rng.choice(of_workers))]


def _fault(rng: random.Random, kinds: dict[str, tuple[float, float]], until: float) -> Fault:
    kind = rng.choices(list(kinds), [weight for weight, _ in kinds.values()])[0]
    seconds = rng.uniform(0.0, kinds[kind][1])
    return Fault(round(rng.uniform(0.05, until), 3), kind, rng.randrange(100), round(seconds, 3))
