"""Faults of the clients' side of the protocol, and faults that attacks on the first version found."""

from __future__ import annotations

from functools import partial

from tests.simulation.mutants.mutant import Mutant

_trust = partial(Mutant, file="trust.py")
_store = partial(Mutant, file="stores/redis/store.py")
_question = partial(Mutant, file="stores/redis/question.py")
_heartbeat = partial(Mutant, file="heartbeat.py")
_pulse = partial(Mutant, file="pulse.py")
_run = partial(Mutant, file="task/run.py")
_acquisition = partial(Mutant, file="task/acquisition.py")
_redelivery = partial(Mutant, file="task/redelivery.py")
_refusal = partial(Mutant, file="task/refusal.py")
_children = partial(Mutant, file="worker/children.py")

MUTANTS = (
    _trust(
        "drift is left out",
        old="return sent_at + ttl - (ttl * DRIFT_SHARE + RESOLUTION)",
        new="return sent_at + ttl",
        breaks="the holder stops trusting first",
        kind="locks",
    ),
    _trust(
        "given up when it is over",
        old="GIVE_UP_BEFORE = 1 / 3",
        new="GIVE_UP_BEFORE = -1 / 6",
        breaks="a holder is stopped before its lease can be another's",
    ),
    _trust(
        "renewed too late",
        old="RENEW_AFTER = 1 / 3",
        new="RENEW_AFTER = 1.1",
        breaks="a body that is well keeps its lock",
    ),
    _store(
        "trusted from the answer to a renewal",
        old="            return sent_at, self._servers.run_each(renewals, step=step)\n        except",
        new="            sent_at, *answers = [0.0, *self._servers.run_each(renewals, step=step)]\n"
        "            return clock.now(), answers\n        except",
        breaks="trust counts from sending",
    ),
    _question(
        "trusted from the answer",
        old="return request.lease(fence=fence, sent_at=sent_at, slot=slot)",
        new="return request.lease(fence=fence, sent_at=clock.now(), slot=slot)",
        breaks="trust counts from sending",
        kind="locks",
    ),
    _question(
        "a late answer counts",
        old="if not trust.came_in_time(sent_at, request.ttl):",
        new="if clock.now() - sent_at > request.ttl * 9:",
        breaks="what was not answered in time is asked for again",
        kind="locks",
    ),
    _question(
        "tries that were not answered are not named",
        old="late=tuple(late)",
        new="late=()",
        breaks="what arrives late of a request that was given up takes nothing",
        kind="locks",
    ),
    _store(
        "an abandoned acquire is not undone",
        old="            self._end(call_id, question.undone(), request.ttl, at_once=answers)\n",
        new="",
        breaks="what was given up is taken back",
        kind="locks",
    ),
    _store(
        "ends are not said again",
        old="        repeat()\n        return None\n",
        new="        return None\n",
        breaks="what was not answered is said again",
    ),
    _store(
        "a repeated end is told as lost",
        old="self._run_end(call.again(repeated=False)) else Freeing.UNCLEAR",
        new="self._run_end(call.again(repeated=False)) else Freeing.NOT_OURS",
        breaks="a lock that was freed is not reported as lost",
        unseen="it is said in a log and a signal only",
    ),
    _heartbeat(
        "a lost lease goes on",
        old="                else:\n                    watched.lose(lease, GONE)",
        new="                else:\n                    watched.renewed(lease)",
        breaks="a holder hears that its lock is lost",
        unseen="few plans take a lock away from its holder; tests/unit/test_heartbeat.py sees it",
    ),
    _heartbeat(
        "the heartbeat renews nothing",
        old="renewed = self._store.renew(leases, timeout=step)",
        new="renewed = [True for _ in leases]",
        breaks="a lease that is trusted is kept",
    ),
    _heartbeat(
        "a renewal that failed counts",
        old="if lease.renewals > before:",
        new="lease.extend(began)\n                if lease.renewals > before:",
        breaks="silence extends no trust",
    ),
    _heartbeat(
        "an overdue lease is not asked about",
        old="            if not ours:\n                lease.lose(GONE)",
        new="            if not ours:\n                lease.extend(clock.now())",
        breaks="check() says so when the lock is lost",
    ),
    Mutant(
        "never given up",
        "watched.py",
        "        if now >= give_up_at:",
        "        if now >= give_up_at + lease.ttl:",
        "a holder is stopped before its lease can be another's",
        unseen="the next try is given up as it begins: it gets no more time than the first one",
    ),
    _pulse(
        "no rounds",
        old="                    rounds.append((watched.due_at, heartbeat))",
        new="                    rounds = []",
        breaks="a body that is well keeps its lock",
    ),
    _pulse(
        "not given up while a renewal is under way",
        old="                if lease.reason is None and under_way:",
        new="                if lease.ttl < 0:",
        breaks="a holder is stopped before its lease can be another's",
        kind="locks",
    ),
    _pulse(
        "a loss is not told",
        old="                watched.on_lost()",
        new="                watched.lease()",
        breaks="a holder hears that its lock is lost",
    ),
    Mutant(
        "check() is silent",
        "lease.py",
        "        if not self.held:\n            raise LockLost",
        "        if not self.held and self.ttl < 0:\n            raise LockLost",
        "check() says so when the lock is lost",
    ),
    _run(
        "a body is not stopped",
        old="            self._body.strike()\n",
        new="            self._body.end\n",
        breaks="a holder is stopped before its lease can be another's",
    ),
    _run(
        "the record comes before the body",
        old="            with self._body:\n",
        new="            it.runtime.store.remember(it.key, it.record(Outcome(states.SUCCESS)))\n"
        "            with self._body:\n",
        breaks="what is recorded has run",
    ),
    _run(
        "no record",
        old="freed = it.runtime.store.free(lease, record=it.record(ended), reservation=kept)",
        new="freed = it.runtime.store.free(lease, reservation=kept)",
        breaks="no body runs again after its end",
    ),
    _run(
        "freed before the body ends",
        old="            with self._body:\n",
        new="            it.runtime.store.free(lease)\n            with self._body:\n",
        breaks="one at a time",
    ),
    _run(
        "the lock is not freed",
        old="            self._free(ended, reservation)\n",
        new="            settling.settle_after(it, ended) if ended else None\n",
        breaks="the end of a run frees its lock",
    ),
    _run(
        "what lost its lock is remembered as failed",
        old="self.was_lost = self.superseded is None and not lease.held and _is_failure(error)",
        new="self.was_lost = False",
        breaks="what failed without its lock has the end of its copy",
    ),
    _run(
        "reserved too briefly",
        old="return Reservation(following, seconds_until(error) + late)",
        new="return Reservation(following, 0.05)",
        breaks="lock_retain_on_retry keeps the lock between two attempts",
    ),
    _run(
        "settled before all was sent",
        old="                settling.settle_after(it, ended)\n        if freed:",
        new="                it.runtime.record_writer.replace(\n"
        "                    it.key, it.record(Outcome(ended.state, settled=True)))\n        if freed:",
        breaks="what follows on a message is sent",
    ),
    Mutant(
        "never settled",
        "task/settling.py",
        "    settle()\n",
        "    repr(settle)\n",
        "what was sent is not sent again",
    ),
    _acquisition(
        "a delivery gives nothing up",
        old="            except LockUnavailable as error:\n                self.abandon()\n",
        new="            except LockUnavailable as error:\n",
        breaks="what a delivery gave up never counts as running elsewhere",
        unseen="the store has undone what it asked for by then",
    ),
    _acquisition(
        "asks on under the owner that it gave up",
        old="self._owner, self.execution.progress.gives_up = new_owner(), None",
        new="self.execution.progress.gives_up = None",
        breaks="no delivery asks again under an owner that it gave up",
        unseen="few plans are silent for that long; tests/unit/test_refusal.py sees it",
    ),
    _acquisition(
        "every delivery has one owner",
        old="self._owner = self._delivered_as or new_owner()",
        new="self._owner = execution.holder.reserved_as",
        breaks="an owner is one delivery's",
    ),
    _acquisition(
        "one too many",
        old="limit=it.options.limit,\n            given_up=self.given_up,",
        new="limit=it.options.limit + 1,\n            given_up=self.given_up,",
        breaks="lock_limit at a time",
    ),
    _acquisition(
        "records are not asked for",
        old="once=it.is_remembered,",
        new="once=False,",
        breaks="no body runs again after its end",
    ),
    _acquisition(
        "the living are left behind",
        old="if found.holder is None or not process_identity.is_over(found.holder.process):",
        new="if found.holder is None:",
        breaks="one at a time",
    ),
    _acquisition(
        "the process that left a lock is not looked for",
        old="if found.holder is None or not process_identity.is_over(found.holder.process):",
        new="if found.holder is None or found.holder.process != '?':",
        breaks="a worker of the same host frees what another left",
    ),
    _acquisition(
        "a waiter waits forever",
        old="                    if left <= 0:\n                        break\n",
        new="                    left = max(left, 1.0)\n",
        breaks="lock_wait is the longest that anybody waits",
    ),
    _acquisition(
        "a retry does not wait for its own attempt",
        old="patience = OWN_RETRY_WAIT",
        new="patience = self._wait",
        breaks="a retry goes on when its attempt has ended",
    ),
    Mutant(
        "a copy does not know which owner was given up",
        "task/requeue.py",
        "    owners = given_up(request) if owner is None else (*given_up(request), owner)\n",
        "    owners = given_up(request)\n",
        "what a delivery gave up never counts as running elsewhere",
        kind="sent",
    ),
    Mutant(
        "a put-back copy is another attempt",
        "task/requeue.py",
        '    raise GoesOn(f"put back, {begins}")\n',
        "    return\n",
        "a message is put back once",
    ),
    Mutant(
        "a waiter does not confirm",
        "stores/redis/waiter.py",
        "return None if isinstance(found, Lease) and not self._confirm(found) else found",
        "found.begin(clock.now()) if isinstance(found, Lease) else None\n        return found",
        "what is handed over is trusted when it is confirmed",
    ),
    Mutant(
        "a waiter only looks",
        "stores/redis/waiter.py",
        "ONLY_LOOKS = lock_commands.WAITING_TTL / 2",
        "ONLY_LOOKS = 600.0",
        "the end of a hold wakes a waiter",
    ),
    Mutant(
        "a waiter that looks sees no change",
        "stores/redis/store.py",
        "if now is not None and now.owner == last.owner:\n                    return now",
        "if now is None or now.owner == last.owner:\n                    return now or last",
        "a free lock reaches its waiter",
        unseen="a lock that gets free without a wake-up is a dead holder's; tests/contract/test_waiter.py sees it",
    ),
    Mutant(
        "a waiter leaves its question behind",
        "stores/waiters.py",
        "            self._leave(error is not None or not isinstance(self._found, Lease))\n",
        "            pass\n",
        "a waiter that leaves takes nothing",
        kind="locks",
    ),
    Mutant(
        "a waiter that leaves frees what it has",
        "stores/waiters.py",
        "            self._leave(error is not None or not isinstance(self._found, Lease))\n",
        "            self._leave(True)\n",
        "a lease that is trusted is kept",
    ),
    Mutant(
        "what is handed over lasts",
        "stores/redis/lock_commands.py",
        "HAND_OVER_TTL = 1.0",
        "HAND_OVER_TTL = 60.0",
        "a waiter that is frozen costs the others a second",
        kind="locks",
    ),
    _redelivery(
        "a copy does not stand by",
        old="if holder.attempt > own or (holder.attempt == own and not execution.task.acks_late):",
        new="if holder.attempt >= own:",
        breaks="no message is lost with its worker",
    ),
    _redelivery(
        "a copy looks at once",
        old="SETTLING = 10.0",
        new="SETTLING = 0.0",
        breaks="what was sent is not sent again",
    ),
    _redelivery(
        "a copy never records the end again",
        old="is_over = recorded.settled or recorded.state in _SILENT",
        new="is_over = True",
        breaks="what follows on a message is sent",
    ),
    _redelivery(
        "a settled message is told again",
        old="is_over = recorded.settled or recorded.state in _SILENT",
        new="is_over = recorded.state in _SILENT",
        breaks="what was sent is not sent again",
    ),
    _refusal(
        "refused without a look",
        old="            copy = _record(acquisition, policy, met)\n",
        new="            copy = None\n",
        breaks="one message, one end",
    ),
    _refusal(
        "failed without a look",
        old="        return _record_at_store(acquisition, outcome.ended_by(it.task, it.request, lost))\n",
        new="        return None\n",
        breaks="what failed without its lock has the end of its copy",
    ),
    _children(
        "the main process renews nothing",
        old="                self._free_for_the_dead()\n                self._renew()\n",
        new="                self._free_for_the_dead()\n",
        breaks="a child that is stopped keeps its lock",
    ),
    _children(
        "the main process frees for the living",
        old="dead = [watched[pidfd] for pidfd in _poll([*watched], 0.0)]",
        new="dead = [*watched.values()]",
        breaks="one at a time",
    ),
    _children(
        "the main process frees for nobody",
        old="            if (hold := child.hold()) is not None:\n                free(",
        new="            if (hold := child.hold()) is None:\n                free(",
        breaks="the lock of a dead child is free at once",
    ),
    _children(
        "what a dead child sent may take",
        old="    freed = store.abandon(hold)\n",
        new="    freed = store.free(hold)\n",
        breaks="what a child sent with its last breath takes nothing",
    ),
    Mutant(
        "a lost child's message goes back first",
        "worker/request.py",
        "        self._free_if_gone()\n        if not isinstance(error, Terminated)",
        "        if not isinstance(error, Terminated)",
        "a redelivery is not refused by the lock of the dead",
        unseen="the thread that looks after children has freed it by then",
    ),
    Mutant(
        "the end of a lost child is not recorded",
        "worker/request.py",
        "return not (self._goes_on or self.was_cancelled) and",
        "return not self.was_cancelled and",
        "a message that goes back has no end",
    ),
    Mutant(
        "an interrupted body has ended",
        "task/outcome.py",
        "    return None  # The process is being stopped; whatever stops it decides what becomes of the message.",
        "    return Outcome(states.FAILURE)",
        "no message is lost with its worker",
    ),
    Mutant(
        "any message is a copy",
        "holder.py",
        'return self.sending != "" and self.sending == other.sending',
        'return self.sending != ""',
        "a message that meets another is none of its copies",
    ),
    Mutant(
        "no message is a copy",
        "holder.py",
        'return self.sending != "" and self.sending == other.sending',
        "return self.sending == other.record",
        "one message, one end",
    ),
    Mutant(
        "all attempts have one record",
        "holder.py",
        'return f"{self.record or self.sending}:{self.replaced}.{self.retries}"',
        'return f"{self.record or self.sending}:{self.replaced}.0"',
        "a retry is carried out",
    ),
)
