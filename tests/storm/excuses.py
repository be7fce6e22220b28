"""The exceptions of `docs/guarantees.md`, as narrow as a history allows; each use of one is counted.

An excuse needs a fault that explains it: at that time, in that process or between its host and the lock servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tests.storm.story import Attempt, Line, Story

FROZEN, HOGGED = "frozen, longer than its lease", "GIL held, longer than its lease"
FORGOT = "the lock servers forgot"
KILLED = "killed between its last line and the record"
KILLED_RETRYING = "killed as it retried"
FROZEN_AT_THE_END = "frozen between its last line and the record"
SILENT = "ended while no lock server answered"
REJECTED = "rejected"
UNSENT = "sent, but not as far as Celery knows"
UNTOLD = "stored, but not as far as Celery knows"
LOST_BY_BROKER = "lost by the broker"
KILLED_AS_IT_BEGAN = "struck as it began"
SLOW_TO_BEGIN, SLOW_TO_SEND = "slow to begin", "slow to send"
UNREPEATED = "on too few lock servers"
UNHEARD = "no lock server could say it"

#: Each excuse, and the exception of the guarantees that it is.
REASONS: Mapping[str, str] = {
    FROZEN: "a whole worker stood still between two instructions while its lease ended; stopped when it went on",
    HOGGED: "C code held the GIL of a pool without a main process that renews",
    FORGOT: "a majority of the lock servers came back empty or with older data; stopped at the next renewal",
    KILLED: "the worker died in the round trip between the end of a body and the record",
    KILLED_RETRYING: "Celery sends the next attempt before the body is over; the worker died before that was recorded",
    FROZEN_AT_THE_END: "the worker stood still in that round trip until its lease had ended",
    SILENT: "the end reached no lock server until the lease was over, or the worker had died or stood still",
    REJECTED: "a rejected message leaves no record",
    UNSENT: "Celery failed a step or a retry that the broker had taken, as it could not hear or tell that",
    UNTOLD: "Celery failed a task when it had stored its success, and could not tell or send the rest; it stays",
    KILLED_AS_IT_BEGAN: "the worker died or stood still after the lock of a message was freed, before its body began",
    SLOW_TO_BEGIN: "the lock of a message was freed, and then a server did not answer before its body began",
    SLOW_TO_SEND: "to send a message took longer than its lock keeps others out, counted from when it was taken",
    UNREPEATED: "a worker wrote an end where it could, and was killed; of the lock servers that had it, one forgot",
    UNHEARD: "a run hears as it renews that it is to stop for a newer one, and no lock server answered meanwhile",
    LOST_BY_BROKER: "kombu had taken it off the list, and not written down that it had, when it was killed or cut off",
}

#: Errors with which Celery fails what it has sent without knowing it: a next step, the body of a chord, or a task whose
#: next attempt is sent, if it cannot tell the result backend (or, with `Reject`, did not learn that it is sent). No
#: task of the storm fails that way. Each error has the fault that causes it, of the broker, which also stores results.
ERRORS_OF_SENDING: Mapping[str, str] = {
    "BusyLoadingError": "broker: restarts",
    "ChordError": "broker",
    "ConnectionError": "broker",
    "OperationalError": "broker",
    "TimeoutError": "broker",
}

#: Seconds that may pass from a fault of the broker until Celery gives up sending: it tries three times.
SENDING = 10.0

#: Shares of the ttl: the shortest freeze of a process whose lease ends meanwhile (protocol, section 5: it was to be
#: stopped at least two fifteenths before); the time after which a body that resumed has been stopped; and the time
#: after which a body whose lock was forgotten has been stopped: a renewal is due after a third, and a child that does
#: not end is killed a tenth later. Half a tenth is added for a slow machine.
STANDS_STILL, GOES_ON, FORGOTTEN = 0.13, 0.3, 0.55

#: Smallest share of the ttl that is left of a lease when its next renewal is due.
REST = 0.6

#: Share of the ttl within which a process writes its record if no fault of the lock server concerns it.
ROUND_TRIP = 0.25


class Excuses:
    """The excuses that a story gives if locks last for `ttl` seconds."""

    def __init__(self, story: Story, ttl: float) -> None:
        self._story, self._ttl = story, ttl

    def of_overlap(self, first: Attempt, second: Attempt) -> str:
        """Why a body may go on when a second one begins."""
        before, after = first.gap_at(second.start)
        # A process that froze within its lease asks when it resumes. It may write a line before it is stopped.
        earlier, _ = first.gap_at(before)
        for begin, end in ((before, after), (earlier, before)):
            stood_still = end - begin >= STANDS_STILL * self._ttl
            if stood_still and begin <= second.start and first.end <= end + GOES_ON * self._ttl:
                return self._why_still(first, begin, end)
        if second.fence < first.fence:  # The second had the lock first, and was slow to begin.
            first, second, since = second, first, second.start - self._ttl
        else:
            since = first.start
        at = self._story.forgot(since, second.start)
        if at is None:
            return ""
        moved = first.stood_still(at, first.end, STANDS_STILL * self._ttl)
        late = self._ttl / 3 if self._story.silences.touch(first.host, at, at + self._ttl) else 0.0
        return FORGOT if first.end - moved <= at + late + FORGOTTEN * self._ttl else ""

    def _why_still(self, attempt: Attempt, begin: float, end: float) -> str:
        if any(self._story.struck(attempt.pid, "frozen", begin, end)):
            return FROZEN
        # If only a child is stopped, it keeps its lock as long as its main process can renew.
        alone = self._story.struck(attempt.pid, "stopped", begin, end)
        if any(self._story.silences.touch(attempt.host, one.begin, one.end) for one in alone):
            return FROZEN
        return HOGGED if self._story.hogged(attempt.pid, begin, end) else ""

    def of_second_run(self, first: Attempt, second: Attempt) -> str:
        """Why a body may begin after the success of its message."""
        excuse = self._why_unrecorded(first, second.start)
        if excuse != FORGOT and second.retries < first.retries:
            return self._of_earlier_attempt(first, second)
        return excuse

    def _why_unrecorded(self, first: Attempt, at: float) -> str:
        """Why nobody knows, at that time, that a body has ended."""
        soon = first.end + ROUND_TRIP * self._ttl
        if self._story.forgot(first.end, at, written=soon) is not None:
            return FORGOT
        told = any(first.end <= line["at"] < at for line in self._story.told.get(first.message, ()))
        killed = list(self._story.struck(first.pid, "killed", first.end, at))
        if any(one.begin <= soon for one in killed) and not told:
            return KILLED
        if any(one.begin <= soon for one in self._story.struck(first.pid, "frozen", first.end, at)):
            return FROZEN_AT_THE_END
        # Its lease ended during the freeze, and its body ended when it resumed, before it was stopped.
        woken = self._story.struck(first.pid, "frozen", first.end - GOES_ON * self._ttl, first.end)
        if at <= soon and any(one.end - one.begin >= REST * self._ttl for one in woken):
            return FROZEN_AT_THE_END
        # A process that is alive reports the end as soon as a server answers. A process that was already ending when
        # it wrote its last line was alive until it had ended.
        over = min([at, *(one.begin if one.begin > first.end else one.end for one in killed)])
        still = ((one.begin, one.end) for one in self._story.struck(first.pid, "frozen", first.end, at))
        if self._story.silences.cover(first.host, min(soon, over), over, still=still):
            return SILENT
        lacks = any(self._story.lacks(first.host, first.end, one.begin, at) for one in killed)
        return UNREPEATED if lacks else ""

    def _of_earlier_attempt(self, first: Attempt, second: Attempt) -> str:
        """The excuse of an attempt whose next attempt succeeded: each attempt has its own record."""
        for before in self._story.attempts.values():
            if (before.message, before.retries) == (second.message, second.retries) and before.end < first.start:
                told = self._story.told.get(before.message, ())
                ends = [one for one in told if one.get("error") == "Reject" and before.end <= one["at"] < second.start]
                if any(self._was_sent(one) for one in ends):
                    return REJECTED
                if any(self._story.struck(before.pid, "killed", before.end, first.start)):
                    return KILLED_RETRYING
                if excuse := self._why_unrecorded(before, second.start):
                    return excuse
        return ""

    def of_end(self, end: Line, at: float) -> str:
        """Why a message may go on, at a later time, after this end."""
        error = end.get("error")
        if error == "Reject" and self._story.sent.get(end["message"], {}).get("policy", "reject") == "reject":
            return REJECTED
        if self._was_sent(end):
            return UNSENT
        if error == "LockLost" and (excuse := self._of_loss(end, at)):
            return excuse
        written = self._recorded_at(end)
        return FORGOT if self._story.forgot(written, at, written=written) is not None else ""

    def _of_loss(self, end: Line, at: float) -> str:
        """Why nobody knows, at that time, that a run was stopped."""
        runs = [one for one in self._story.attempts.values() if (one.message, one.pid) == (end["message"], end["pid"])]
        stopped = [one for one in runs if one.end <= end["at"]]
        return self._why_unrecorded(stopped[-1], at) if stopped else ""

    def of_ends(self, first: Line, second: Line) -> str:
        """Why two different ends of a message may be reported."""
        if first["state"] == "SUCCESS" and self._is_of_sending(second):
            return UNTOLD
        for one in (second, first):
            if excuse := self.of_end(one, second["at"]):
                return excuse
        ran = [one for one in self._story.attempts.values() if one.message == first["message"] and one.how == "done"]
        for teller, other in ((first, second), (second, first)):  # Each may have been reported late.
            told_by = [one for one in ran if one.pid == teller["pid"] and one.end <= min(first["at"], teller["at"])]
            if told_by and (excuse := self._why_unrecorded(told_by[-1], other["at"])):
                return excuse
        return ""

    def of_missing(self, before: Iterable[str]) -> str:
        """Why what follows on these messages was not sent."""
        ends = (end for message in before for end in self._story.told.get(message, ()))
        return UNTOLD if any(map(self._is_of_sending, ends)) else ""

    def of_tick(self, first: Attempt, second: Attempt) -> str:
        """Why a tick may be sent for a second time."""
        return FORGOT if self._story.forgot(first.start - self._ttl, second.start) is not None else ""

    def _recorded_at(self, end: Line) -> float:
        """When an end was recorded: when it was reported, unless the same process noted an earlier record."""
        lines = self._story.recorded.get(end["message"], ())
        times = [line["at"] for line in lines if line["pid"] == end["pid"] and line["at"] <= end["at"]]
        return max(times, default=end["at"])

    def _was_sent(self, end: Line) -> bool:
        """Whether Celery failed something that the broker had accepted: a step, or a task by its next attempt."""
        message, is_step = end["message"], bool(self._story.sent.get(end["message"], {}).get("after"))
        if any(one == message and retries > 0 for one, retries in self._story.broker):
            return self._is_of_sending(end) or (
                end.get("error") == "Reject" and self._broker_failed("broker", end["at"])
            )
        return is_step and self._is_of_sending(end)

    def _is_of_sending(self, end: Line) -> bool:
        kind = ERRORS_OF_SENDING.get(end.get("error", ""))
        return kind is not None and self._broker_failed(kind, end["at"])

    def _broker_failed(self, kind: str, at: float) -> bool:
        return any(one.kind.startswith(kind) and one.overlaps(at - SENDING, at) for one in self._story.faults)
