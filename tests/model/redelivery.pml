/* One message that a broker redelivers, its copies, and another task that wants the same lock.
 *
 * The message is acknowledged late, and skipped if the other task has the lock. lease.pml shows that a trusted lease is
 * held, so a hold ends here only after its body. An unanswered release is repeated, and arrives before the hold ends by
 * itself. A worker may die at any step; the broker redelivers its messages.
 */

#define WORKERS 2
#ifndef REDELIVERIES
#define REDELIVERIES 2
#endif
#ifndef SILENCES
#define SILENCES 2
#endif
#ifndef DEATHS
#define DEATHS 1
#endif

#define NOTHING 0
#define SUCCESS 1
#define FAILURE 2
#define REVOKED 3

/* The holder of the lock. */
#define FREE 0
#define OTHER 1
#define COPY(w) (2 + w)
#define IS_COPY(holder) (holder > OTHER)

byte holder, record;                /* on the lock server */
byte queued = 1;                    /* copies in the queue */
bit in_hand[WORKERS];               /* an unacknowledged copy */
bit freeing[WORKERS];               /* an unanswered release */
byte told;                          /* the end that the result backend, the chain and the callers know of */
bit done;                           /* whether a body has come to its end */
byte redeliveries, deaths, silences;

inline tell(w, end) {
  printf("worker %d: the message has ended: %d\n", w, end);
  assert(told == NOTHING || told == end);       /* A message has one end. */
  assert(end != SUCCESS || done);
  told = end
}

inline acknowledge(w) {
  in_hand[w] = 0;
  assert(told != NOTHING || queued || in_hand[0] || in_hand[1]);     /* It is not lost. */
}

inline begin(w) {
  printf("worker %d has the lock, and begins the body\n", w);
  assert(told == NOTHING);                      /* A message that was refused, or has ended, is not carried out. */
#ifdef RECORD_BEFORE_BODY
  record = SUCCESS
#endif
}

#ifdef REFUSE_IGNORES_RECORD
#define FINDS_RECORD false
#else
#define FINDS_RECORD (record != NOTHING)
#endif
#ifdef REFUSE_IGNORES_HOLD
#define FINDS_COPY(w) false
#else
#define FINDS_COPY(w) (IS_COPY(holder) && holder != COPY(w))
#endif

/* The script that records that a message is not carried out; it answers with `found` or `copy`. */
inline refuse(w, end) {
  if
  :: FINDS_RECORD -> found = record
  :: !FINDS_RECORD && FINDS_COPY(w) -> copy = 1
  :: else ->
    found = end;
#ifndef REFUSAL_NOT_RECORDED
    record = end
#endif
  fi;
  printf("worker %d: refuse: record %d, holder %d\n", w, record, holder)
}

proctype Worker(byte w) {
  byte found;
  bit copy;
idle:
end:
  atomic { queued > 0 && !freeing[w] -> queued--; in_hand[w] = 1; printf("worker %d is delivered a copy\n", w) }
asking:
  if
  :: atomic {
      if
#ifndef ACQUIRE_IGNORES_RECORD
      :: record != NOTHING -> found = record; printf("worker %d: acquire: done\n", w); goto ending
#endif
      :: record == NOTHING && IS_COPY(holder) -> printf("worker %d: acquire: held by a copy\n", w); goto standing_by
      :: record == NOTHING && holder == OTHER -> printf("worker %d: acquire: held by the other task\n", w); goto refusing
#ifdef ACQUIRE_IGNORES_RECORD
      :: holder == FREE -> holder = COPY(w); begin(w)
      :: else -> goto standing_by
#else
      :: record == NOTHING && holder == FREE -> holder = COPY(w); begin(w)
#endif
      fi }; goto body
  /* No answer in time: it gives up a token that cannot take the lock later. */
  :: atomic { silences < SILENCES -> silences++; printf("worker %d gets no answer\n", w); goto standing_by }
  :: atomic { deaths < DEATHS -> goto dying }
  fi;
body:
  if
  :: atomic { done = 1; printf("worker %d: the body has returned\n", w) }
  :: atomic { deaths < DEATHS -> goto dying }
  :: atomic { deaths < DEATHS -> deaths++; holder = FREE; printf("worker %d loses the lock, and stops the body\n", w);
      goto failing }
  fi;
#ifdef TELL_BEFORE_RECORD
  atomic { tell(w, SUCCESS); acknowledge(w) }
#endif
  if
  :: atomic { holder = FREE; record = SUCCESS; printf("worker %d: free, with the record\n", w) }
  :: atomic { freeing[w] = 1; printf("worker %d: free is not answered, and will be repeated\n", w) }
  :: atomic { deaths < DEATHS -> goto dying }
  fi;
  atomic { found = SUCCESS; goto ending };

failing:
  if
  :: atomic { refuse(w, FAILURE);
      if
      :: copy -> copy = 0; goto standing_by
      :: else -> goto ending
      fi }
  :: atomic { deaths < DEATHS -> goto dying }
  fi;
refusing:
  if
  :: atomic { refuse(w, REVOKED);
      if
      :: copy -> copy = 0; goto standing_by
      :: else -> goto ending
      fi }
  :: atomic { deaths < DEATHS -> goto dying }
  fi;
ending:
  if
  :: atomic {
#ifndef TELL_BEFORE_RECORD
      tell(w, found); acknowledge(w);
#else
      if
      :: in_hand[w] -> tell(w, found); acknowledge(w)
      :: else
      fi;
#endif
      found = NOTHING }; goto idle
  :: atomic { deaths < DEATHS -> goto dying }
  fi;
standing_by:
  if
#ifdef ACKNOWLEDGED_FIRST
  :: atomic { acknowledge(w); printf("worker %d acknowledges the copy\n", w) };
     atomic { queued++; printf("worker %d puts the copy back\n", w) }; goto idle
#else
  :: atomic { queued++; printf("worker %d puts the copy back\n", w) };
     atomic { acknowledge(w); printf("worker %d acknowledges the copy\n", w) }; goto idle
#endif
  :: atomic { deaths < DEATHS -> goto dying }
  fi;
dying:
  atomic {
    deaths++; found = NOTHING; copy = 0;
    printf("worker %d dies\n", w);
    /* Its main process, another worker of its host, or the end of the lease frees the lock before the message goes back;
     * nobody repeats an unanswered request any more. */
    freeing[w] = 0;
#ifndef HOLD_OUTLIVES_WORKER
    if
    :: holder == COPY(w) -> holder = FREE
    :: else
    fi;
#endif
    if
    :: in_hand[w] -> in_hand[w] = 0; queued++
    :: else
    fi };
  goto idle
}

inline repeated(w) {
  if
  :: holder == COPY(w) -> holder = FREE
  :: else
  fi;
  if
  :: record == NOTHING -> record = SUCCESS
  :: else
  fi;
  printf("the end of worker %d's lock arrives\n", w)
}

proctype Network() {
end:
  do
  :: atomic { freeing[0] -> freeing[0] = 0; repeated(0) }
  :: atomic { freeing[1] -> freeing[1] = 0; repeated(1) }
  :: atomic { redeliveries < REDELIVERIES && (in_hand[0] || in_hand[1]) ->
      redeliveries++; queued++; printf("the broker delivers again\n") }
#ifdef LONG_SILENCE
  :: atomic { freeing[0] && holder == COPY(0) -> holder = FREE; printf("the hold of worker 0 ends by itself\n") }
#endif
#ifdef RECORD_TOO_SHORT
  :: atomic { record -> record = NOTHING; printf("the record ends\n") }
#endif
  od
}

proctype Other() {
  do
  :: atomic { holder == FREE -> holder = OTHER; printf("the other task takes the lock\n") };
     atomic { holder = FREE; printf("the other task frees the lock\n") }
  od
}

init { atomic { run Worker(0); run Worker(1); run Network(); run Other() } }

ltl ended { <>[] (told != NOTHING && queued == 0 && !in_hand[0] && !in_hand[1] && !freeing[0] && !freeing[1]) }
