"""Faults of copies that wait in line for a lock, in workers' main processes."""

from __future__ import annotations

from functools import partial

from tests.simulation.mutants.mutant import Mutant

_line = partial(Mutant, file="worker/line.py", kind="lines")
_wake_ups = partial(Mutant, file="stores/redis/wake_ups.py", kind="lines")
_request = partial(Mutant, file="worker/request.py", kind="lines")
_celery = partial(Mutant, file="_celery.py", kind="lines")

MUTANTS = (
    _line(
        "a wake-up of a copy is forgotten",
        old="        self._called.append((freed, self._next(freed)))\n",
        new="",
        breaks="a copy is begun as its lock is freed",
    ),
    _line(
        "the loop is not told of a call",
        old="            self._due.give()\n",
        new="            pass\n",
        breaks="a copy is begun as its lock is freed",
    ),
    _line(
        "a call for nothing is not given back",
        old="            if request is None:\n                self._unused.append(partial(self._pass_on, freed))",
        new="",
        breaks="a wake-up that one process has no use for is another's",
    ),
    _line(
        "a copy that was called stays in line",
        old="        self.called = heapq.heappop(self._heap)[-1]",
        new="        self.called = self._heap[0][-1]",
        breaks="a copy is begun once",
    ),
    _line(
        "copies are begun as they came here",
        old="heapq.heappush(self._heap, (place.since, order, place.limit, ref(request)))",
        new="heapq.heappush(self._heap, (0.0 * place.since, order, place.limit, ref(request)))",
        breaks="first come, first served",
    ),
    _line(
        "a busy worker keeps the wake-up",
        old="        if not has_room and self._wake_ups.pass_on(freed):\n            return\n",
        new="",
        breaks="a worker that has room begins the copy",
    ),
    _line(
        "a worker that ends stays in line",
        old="        self._wake_ups.leave()\n        # The loop may",
        new="        # The loop may",
        breaks="a worker that ends is not woken",
    ),
    _line(
        "a line ends with its first error",
        old="                self._failures += 1\n                if isinstance",
        new="                return\n                if isinstance",
        breaks="what is lost with a connection is found free",
    ),
    _wake_ups(
        "every lock is looked at when nothing comes or goes",
        old="        if is_due:  # Not whenever it blocks anew: there may always be another lock to block for.\n"
        "            self._strange, self.due = set(), clock.now() + REFRESH\n",
        new="        self._strange, self.due = set(), clock.now() + REFRESH\n",
        breaks="every lock is looked at each two seconds",
    ),
    _wake_ups(
        "nobody looks at what is free already",
        old="if slots < places[key].limit]",
        new="if slots < 0]",
        breaks="what was freed before nobody was told of is found",
    ),
    _wake_ups(
        "an older place counts for nothing",
        old="        if not older:\n            return freed._replace",
        new="        if older is not None:\n            return freed._replace",
        breaks="first come, first served",
    ),
    _wake_ups(
        "what is not for us is kept",
        old="        if self.pass_on(freed):\n            return None\n        # Nobody",
        new="        if freed.passed_on < MAX_PASSED_ON:\n            return None\n        # Nobody",
        breaks="a wake-up goes to the oldest place",
    ),
    _wake_ups(
        "no place is taken",
        old="        commands = [*self._registered(moved, copies), *self._left(left), *self._removals]",
        new="        commands = self._left(left)",
        breaks="each end of a hold pushes an element",
    ),
    _request(
        "a copy in line is begun when its message says",
        old="        return self._held_until or super().eta",
        new="        return super().eta",
        breaks="nobody asks again and again",
    ),
    _request(
        "a copy is held for hours",
        old="                longest = min(HELD, longest_delay(self.app.conf))",
        new="                longest = 7200.0",
        breaks="a copy waits for its own time at most",
    ),
    Mutant(
        "a copy that is put back loses its place",
        "task/requeue.py",
        '    return min(cleaned.seconds(known.get("since")) or math.inf, clock.wall())',
        "    return clock.wall()",
        "first come, first served",
        kind="lines",
    ),
    _celery(
        "the timer keeps what was begun",
        old="            entry.cancel()\n            if hasattr",
        new="            if not hasattr",
        breaks="a copy is begun once",
        unseen="it is taken out of the queue as well",
    ),
    _celery(
        "what was begun stays in the timer",
        old="                timer._queue.remove(waiting)\n                heapq.heapify(timer._queue)\n",
        new="                entry.canceled = False\n",
        breaks="a copy is begun once",
    ),
    _celery(
        "a copy is begun that the timer has given up",
        old="        if not entry.canceled and entry.args and",
        new="        if entry.args and",
        breaks="a copy of a connection that is gone is not begun",
    ),
    _celery(
        "a copy is begun in a worker that ends",
        old="    if consumer.blueprint.state != _bootsteps.RUN:\n        return False\n",
        new="",
        breaks="what has not begun is the broker's when a worker ends",
        unseen="the loop of a worker that ends reads nothing any more",
    ),
    _celery(
        "each worker has room",
        old="    return len(worker_state.reserved_requests) < (pool.num_processes or 1)",
        new="    return True",
        breaks="a worker that has room begins the copy",
    ),
    Mutant(
        "a copy that is done wakes nobody",
        "stores/redis/lock_commands.py",
        "        woken=int(request.in_line),\n",
        "",
        "a wake-up that a copy has no use for is another's",
        kind="lines",
        unseen="the next one is found two seconds later, which is in time where messages are copied",
    ),
)
