/* One lock on one server, and its waiters.
 *
 * A newcomer asks, and takes the lock if it is free; or goes; or lines up: it blocks on a list, and its acquire follows
 * that command. Time advances only when everybody has done its work: those that have not are frozen, gone, or were not
 * heard. lease.pml shows that a trusted lease is held, and renewed in time; here a holder keeps its hold until it frees
 * or dies.
 *
 * A place belongs to one delivery, with its own token. It is taken again when nothing is left of the last one.
 */

#ifndef PLACES
#define PLACES 3
#endif
/* A second is SECOND ticks: a waiter sleeps no longer, and a lock that is handed over lasts so long unless confirmed. */
#ifndef SECOND
#define SECOND 2
#endif
#ifdef HANDED_OVER_FOR_TTL
#define HAND_OVER_TTL TTL
#else
#define HAND_OVER_TTL SECOND
#endif
#define TTL (SECOND + 1)
/* How long the server knows that somebody waits, and that the lock was freed. */
#ifndef WAITING
#define WAITING (SECOND + 1)
#endif
#ifndef WAKE
#define WAKE SECOND
#endif
/* How many processes may die, freeze, or not be heard. 9: any number. */
#ifndef FAULTS
#define FAULTS 9
#endif
/* With PATIENT or OVERTAKEN, the waiter in place 0 waits as long as it takes, without a fault. OVERTAKEN: the maximum
 * number of newcomers that get the lock before it while it blocks. PATIENT: each place is taken once a tick, so that time
 * advances.
 */
#if defined(PATIENT) || defined(OVERTAKEN)
#define IS_PATIENT(i) (i == 0)
#else
#define IS_PATIENT(i) false
#endif

#define TOKEN(i) (i + 1)

mtype = { NOTHING, GIVEN, HELD, GIVEN_UP };
mtype = { AWAY, ASKS, LINES_UP, BLOCKS, CONFIRMS, LEAVES_LINE, HOLDS };

/* The server. */
byte key, left;                     /* the token that holds the lock, and its remaining ticks */
byte waiting, wake;                 /* ticks that `:waiting` and the element of `:wake` still live */
chan blocked = [PLACES] of { byte };    /* the waiters that block on `:wake`, the longest first */
bit behind[PLACES];                 /* it was woken, and its acquire is next */
bit over[PLACES];                   /* :tombstone:<token>: it keeps what it has, and takes nothing */

/* On the way. */
mtype said[PLACES] = NOTHING;       /* the answer to the acquire behind the blocking command */
bit late[PLACES];                   /* an unanswered acquire */
bit ending[PLACES], leaving[PLACES];    /* the unanswered end of a place; of one that got the lock otherwise */

/* The processes. */
mtype is[PLACES] = AWAY;
byte sleeps[PLACES];                /* ticks until it looks */
bit frozen[PLACES];
bit rested[PLACES];                 /* a tick has passed since it left */
byte faults;

/* What is watched. */
bit unheard;                        /* nobody was woken: the hold or the element ended by itself */
bit handed_over;                    /* the hold is not confirmed */
bit was_frozen[PLACES];             /* it has not asked since: it may have come too late to be woken */
byte idle, unattended;              /* ticks that somebody blocks while the lock is free; is kept for a gone waiter */
#ifdef OVERTAKEN
bit later[PLACES];                  /* it came when place 0 already blocked */
byte overtaken;
#endif

#define IS_WOKEN(i) (behind[i] || said[i] != NOTHING)
#define IS_IN_LINE(i) (blocked??[eval(i)] || IS_WOKEN(i))
#define IS_LEFT(i) (key == TOKEN(i) || late[i] || ending[i] || leaving[i] || IS_IN_LINE(i))

#if FAULTS == 9
#define MAY_FAIL(i) (!IS_PATIENT(i))
#define FAIL skip
#else
#define MAY_FAIL(i) (!IS_PATIENT(i) && faults < FAULTS)
#define FAIL faults++
#endif

inline give(i, ticks) {
  assert(!(is[i] == AWAY && over[i]));  /* A waiter that has left, and was heard, gets nothing. */
  key = TOKEN(i); left = ticks; unheard = 0; handed_over = 0; idle = 0; unattended = 0;
#ifndef WAKE_UP_STAYS
  wake = 0
#endif
}

#ifdef HAND_OVER_IGNORES_END
#define IS_GIVEN_UP(i) (key == TOKEN(i))
#elif defined(HAND_OVER_IGNORES_HOLD)
#define IS_GIVEN_UP(i) over[i]
#else
#define IS_GIVEN_UP(i) (over[i] || key == TOKEN(i))
#endif

/* The acquire behind the blocking command of a woken waiter; `ringing`: another one must be woken. */
inline hand_over(i) {
  behind[i] = 0;
  if
  :: IS_GIVEN_UP(i) -> said[i] = GIVEN_UP;
#ifndef WAKE_UP_NOT_PASSED_ON
    ringing = 1
#endif
  :: !IS_GIVEN_UP(i) && (key == 0 || key == TOKEN(i)) -> give(i, HAND_OVER_TTL); handed_over = 1; said[i] = GIVEN
  :: else -> waiting = WAITING; said[i] = HELD
  fi;
  printf("server: place %d is woken: held by %d, %d left\n", i, key, left);
  if
  :: is[i] == AWAY || is[i] == HOLDS -> said[i] = NOTHING       /* Its connection is gone. */
  :: else
  fi
}

#ifdef GAP
#define WOKEN(i) behind[i] = 1
#else
#define WOKEN(i) hand_over(i)
#endif

/* Push an element to `:wake` if somebody waits; Redis gives it to a client that blocks. */
inline ring() {
  do
  :: ringing && waiting && len(blocked) > 0 -> ringing = 0; blocked?x; WOKEN(x)
  :: ringing && waiting && len(blocked) == 0 -> ringing = 0; wake = WAKE
  :: ringing && !waiting -> ringing = 0
  :: !ringing -> break
  od;
  x = 0
}

inline block(i) {
  if
  :: wake -> wake = 0; x = i; WOKEN(x); ring()
  :: else -> blocked!i
  fi
}

inline free(i) {
  if
  :: key == TOKEN(i) -> key = 0; left = 0; handed_over = 0;
#ifndef FREE_WAKES_NOBODY
    ringing = 1; ring()
#endif
  :: else
  fi
}

/* From now on, no request or wake-up of this place takes the lock. */
inline end_place(i) {
  over[i] = 1; ending[i] = 0;
  free(i); tidy(i);
  printf("server: the end of place %d: held by %d\n", i, key)
}

/* If nothing is left of it that could take the lock, it may be forgotten. */
inline tidy(i) {
  if
  :: is[i] == AWAY && !IS_LEFT(i) -> over[i] = 0
  :: else
  fi
}

inline begin(i) {
  is[i] = HOLDS; handed_over = 0;
#ifdef OVERTAKEN
  if
  :: i == 0 -> overtaken = 0; later[1] = 0; later[2] = 0
  :: i != 0 && later[i] -> later[i] = 0; overtaken++; assert(overtaken <= OVERTAKEN)
  :: else
  fi
#endif
}

inline go(i) { is[i] = AWAY; said[i] = NOTHING; sleeps[i] = 0; frozen[i] = 0; was_frozen[i] = 0 }

/* A step of a process that is not frozen; and a step of which the server does not hear. */
#define STEP(i, what) is[i] == what && !frozen[i]
#define FAULT(i, what) is[i] == what && !frozen[i] && MAY_FAIL(i)

proctype Process(byte i) {
  byte x;
  bit ringing;
away:
end:
#ifdef PATIENT
  atomic { !IS_LEFT(i) && rested[i] ->
#else
  atomic { !IS_LEFT(i) ->
#endif
    over[i] = 0; is[i] = ASKS; rested[i] = 0;
#ifdef OVERTAKEN
    later[i] = i != 0 && is[0] == BLOCKS;
#endif
    printf("place %d: somebody comes\n", i) }
here:
  if
  :: atomic { STEP(i, ASKS) ->
      was_frozen[i] = 0;
      if
      :: key == 0 || key == TOKEN(i) ->
        give(i, TTL); said[i] = NOTHING;
        if
        :: blocked??[eval(i)] || behind[i] -> is[i] = LEAVES_LINE
        :: else -> begin(i)
        fi;
        printf("place %d asks, and has the lock\n", i)
      :: key && key != TOKEN(i) ->
        waiting = WAITING;
        if
        :: IS_IN_LINE(i) -> is[i] = BLOCKS; sleeps[i] = SECOND
        :: else -> is[i] = LINES_UP
        fi;
        printf("place %d asks, and waits: held by %d\n", i, key)
      :: key && key != TOKEN(i) && !IS_PATIENT(i) && !IS_IN_LINE(i) ->
        printf("place %d asks, and does not wait\n", i); go(i); goto away
      fi }; goto here
  :: atomic { FAULT(i, ASKS) -> FAIL;
      printf("place %d asks, is not answered, and leaves\n", i); late[i] = 1; go(i); end_place(i) }; goto away
  :: atomic { STEP(i, LINES_UP) ->
      printf("place %d blocks\n", i); is[i] = BLOCKS; sleeps[i] = SECOND; block(i) }; goto here
#ifndef NEVER_LOOKS
  :: atomic { STEP(i, BLOCKS) && sleeps[i] == 0 && said[i] == NOTHING ->
#ifdef BLOCKS_ANEW
      if
      :: blocked??[eval(i)] -> blocked??eval(i)
      :: else
      fi;
#endif
      is[i] = ASKS }; goto here
#endif
  :: atomic { STEP(i, BLOCKS) && said[i] != NOTHING ->
      sleeps[i] = 0;
      if
#ifdef NOT_CONFIRMED
      :: said[i] == GIVEN -> begin(i); printf("place %d has heard that it has the lock\n", i)
#else
      :: said[i] == GIVEN -> is[i] = CONFIRMS
#endif
      :: said[i] == HELD -> is[i] = LINES_UP
      :: said[i] == GIVEN_UP -> is[i] = ASKS
      fi;
      said[i] = NOTHING }; goto here
  :: atomic { STEP(i, CONFIRMS) ->
      if
      :: key == TOKEN(i) -> left = TTL; begin(i)
      :: else -> is[i] = ASKS
      fi;
      printf("place %d confirms: held by %d\n", i, key) }; goto here
  /* It has the lock, and pending requests must not take it again. */
  :: atomic { STEP(i, LEAVES_LINE) ->
      over[i] = 1;
#ifdef LEAVING_FREES
      free(i);
#endif
      begin(i); printf("place %d leaves the line: held by %d\n", i, key) }; goto here
  :: atomic { FAULT(i, LEAVES_LINE) -> FAIL;
      leaving[i] = 1; begin(i); printf("place %d leaves the line, and is not heard\n", i) }; goto here
  :: atomic { STEP(i, HOLDS) ->
      go(i); free(i); tidy(i); printf("place %d frees: held by %d\n", i, key) }; goto away
  /* Its time is over, or it is interrupted. */
  :: atomic { is[i] != HOLDS && is[i] != LEAVES_LINE && !frozen[i] && !IS_PATIENT(i) ->
      printf("place %d leaves\n", i); go(i); end_place(i) }; goto away
  :: atomic { is[i] != HOLDS && is[i] != LEAVES_LINE && !frozen[i] && MAY_FAIL(i) -> FAIL;
      ending[i] = 1; go(i); printf("place %d leaves, and is not heard\n", i) }; goto away
  :: atomic { MAY_FAIL(i) -> FAIL;
      go(i);
      if
      :: ending[i] = 1; printf("place %d: its process dies, and its main process gives it up\n", i)
      :: printf("place %d: its process dies, and its main process\n", i)
      fi }; goto away
  :: atomic { is[i] != HOLDS && is[i] != LEAVES_LINE && !frozen[i] && MAY_FAIL(i) -> FAIL;
      frozen[i] = 1; sleeps[i] = 0; printf("place %d is frozen\n", i) }; goto here
  :: atomic { frozen[i] -> frozen[i] = 0; was_frozen[i] = 1; printf("place %d goes on\n", i) }; goto here
  fi
}

/* Requests that the server carries out late, or hears late. */
proctype Wire(byte i) {
  byte x;
  bit ringing;
end:
  do
  :: atomic { late[i] ->
      late[i] = 0;
      if
#ifdef LATE_IGNORES_END
      :: key == 0 || key == TOKEN(i) -> give(i, TTL)
#else
      :: !over[i] && (key == 0 || key == TOKEN(i)) -> give(i, TTL)
#endif
      :: else
      fi;
      tidy(i);
      printf("server: a late acquire of place %d: held by %d\n", i, key) }
  :: atomic { ending[i] -> end_place(i) }
  :: atomic { leaving[i] -> leaving[i] = 0; over[i] = 1; tidy(i); printf("server: place %d has left the line\n", i) }
  :: atomic { blocked??[eval(i)] && (is[i] == AWAY || is[i] == HOLDS) ->
      blocked??eval(i); tidy(i); printf("server: the connection of place %d is closed\n", i) }
#ifdef GAP
  :: atomic { behind[i] -> hand_over(i); ring() }
#endif
  od
}

#ifdef NEVER_LOOKS
#define IS_DUE(i) false
#else
#define IS_DUE(i) (sleeps[i] == 0)
#endif
#define IS_BUSY(i) (behind[i] || !frozen[i] && is[i] != AWAY && is[i] != HOLDS && \
  (is[i] != BLOCKS || said[i] != NOTHING || IS_DUE(i)))
#define WAITS(i) (is[i] == BLOCKS && !frozen[i] && !was_frozen[i])
#define ANY(does) (does(0) || does(1) || does(2))

#define COUNT(what, when) what = (when -> what + 1 : 0)

proctype Time() {
  byte i;
  do
  :: atomic { !IS_BUSY(0) && !IS_BUSY(1) && !IS_BUSY(2) ->
      printf("a tick: held by %d, %d left\n", key, left);
      COUNT(idle, ANY(WAITS) && key == 0);
      COUNT(unattended, ANY(WAITS) && handed_over);
      assert(!idle || unheard);         /* A freed lock is taken at once. */
      assert(idle <= SECOND);           /* A hold that ends by itself, or of a gone or frozen waiter, costs a second. */
      assert(unattended <= SECOND);
      for (i : 0 .. PLACES - 1) {
        rested[i] = (is[i] == AWAY -> 1 : 0);
        if
        :: sleeps[i] -> sleeps[i]--
        :: else
        fi
      }
      i = 0;
      if
      :: key && is[key - 1] != HOLDS ->
        left--;
        if
        :: left == 0 -> i = key - 1; key = 0; unheard = 1; handed_over = 0; tidy(i); i = 0
        :: else
        fi
      :: else
      fi;
      if
      :: waiting -> waiting--
      :: else
      fi;
      if
      :: wake -> wake--; unheard = unheard || wake == 0
      :: else
      fi
    }
  od
}

/* A process that runs its body has the lock for its whole ttl; hence never two of them. */
#define KEPT(i) (is[i] != HOLDS || (key == TOKEN(i) && left == TTL))

proctype Watch() {
end:
  atomic { !(KEPT(0) && KEPT(1) && KEPT(2)) ->
    printf("VIOLATED: held by %d, %d left\n", key, left);
    assert(false) }
}

init {
  byte i;
  atomic {
    for (i : 0 .. PLACES - 1) { run Wire(i); run Process(i) }
    i = 0;
    run Time();
    run Watch()
  }
}

ltl served { [] (is[0] == ASKS -> <> (is[0] == HOLDS)) }
