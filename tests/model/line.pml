/* One lock on one server, and processes that each have a copy of a message, which waits for the lock without a slot.
 *
 * A process blocks on a list, and now and then takes its place again, and looks. A process that is woken passes the
 * wake-up on if another has an older place; otherwise its copy begins, and asks like any other: another may come in
 * between. Time is as in waiters.pml. A process with another name comes when nothing is left of the last one.
 */

#define PROCESSES 3
/* Ticks: one is a second. */
#define REFRESH 2
#define WAITING 3
#define WAKE 1
#define TTL 2
/* How often a wake-up is passed on to a process with an older place. */
#define MAX_PASSED_ON 3
/* How many processes may die, freeze, or have no slot; and how many may come. 9: any number. */
#ifndef FAULTS
#define FAULTS 9
#endif
#ifndef COMING
#define COMING 9
#endif
/* With PATIENT or OVERTAKEN, the copy of process 0 waits as long as it takes, without a fault. OVERTAKEN: the maximum
 * number of copies behind it in line that are woken, and begin before it.
 */
#if defined(PATIENT) || defined(OVERTAKEN)
#define IS_PATIENT(i) (i == 0)
#else
#define IS_PATIENT(i) false
#endif

#define TOKEN(i) (i + 1)
#define NOBODY PROCESSES

mtype = { NONE, PLACE, ZERO };
mtype = { AWAY, BEGINS, PARKED, LISTENS, BLOCKS, HOLDS };

/* The server. */
byte key, left;
mtype noted[PROCESSES] = NONE;      /* in `:waiting`: with its place, or as one that does not count any more */
byte waiting, wake_left;            /* ticks that `:waiting` and `:wake` still live */
chan wake = [PROCESSES] of { byte };    /* how often each element was passed on */
chan blocked = [PROCESSES] of { byte };

/* The processes. */
mtype is[PROCESSES] = AWAY;         /* its copy is parked or begun; or the process listens for it */
byte rank[PROCESSES];               /* the rank of its place: 1 is the oldest; 0: it has met no conflict */
bit heard[PROCESSES];               /* it was woken, and has not read that yet */
byte passed_on[PROCESSES];          /* how often its wake-up was passed on */
byte due[PROCESSES];                /* ticks until it takes its place again, and looks */
bit frozen[PROCESSES], no_slot[PROCESSES], dead[PROCESSES], lasted[PROCESSES];
byte faults, came;

/* What is watched. */
byte idle;                          /* ticks during which the lock is free, and wanted */
bit unheard;                        /* the end of the last hold woke nobody, or a process that did not hear it */
byte overtaken;

#define STANDS(i) (noted[i] == PLACE || heard[i] || blocked??[eval(i)])
#define IS_WAITED_FOR (noted[0] != NONE || noted[1] != NONE || noted[2] != NONE)
#define IS_OLDER(y, i) (y != i && noted[y] == PLACE && rank[y] < rank[i])

#if FAULTS == 9
#define MAY_FAIL(i) (!IS_PATIENT(i))
#define FAIL skip
#else
#define MAY_FAIL(i) (!IS_PATIENT(i) && faults < FAULTS)
#define FAIL faults++
#endif
#if COMING == 9
#define MAY_COME(i) true
#define COME skip
#else
#define MAY_COME(i) (came < COMING)
#define COME came++
#endif

/* Redis gives an element to the client that has blocked longest. */
inline serve() {
  do
  :: len(blocked) && len(wake) ->
    blocked?x; wake?passed_on[x]; heard[x] = 1; unheard = unheard || frozen[x] || dead[x];
    if
    :: dead[x] -> heard[x] = 0; passed_on[x] = 0
    :: else
    fi
  :: else -> break
  od;
  wake_left = (len(wake) -> wake_left : 0);
  x = 0
}

inline clear_wake() {
  do
  :: len(wake) -> wake?x
  :: else -> break
  od;
  wake_left = 0; x = 0
}

inline push(count) {
  if
  :: len(wake) < PROCESSES -> wake!count
  :: else               /* There are already enough. */
  fi;
  wake_left = WAKE; serve()
}

inline free(i) {
  key = 0; left = 0;
  if
#ifndef FREE_WAKES_NOBODY
  :: IS_WAITED_FOR -> clear_wake(); push(0)
#endif
  :: else
  fi
}

inline unblock(i) {
  if
  :: blocked??[eval(i)] -> blocked??eval(i)
  :: else
  fi
}

/* Nobody else gets its place: the others behind it move up. */
inline drop_rank(i) {
  for (y : 0 .. PROCESSES - 1) {
    if
    :: rank[i] && rank[y] > rank[i] -> rank[y]--
    :: else
    fi
  }
  y = 0; rank[i] = 0
}

/* If nothing is left of it, its name is free. */
inline tidy(i) {
  if
  :: (is[i] == AWAY || is[i] == HOLDS) && !STANDS(i) -> drop_rank(i); dead[i] = 0
  :: else
  fi
}

/* Its copy is begun. */
inline call(i) { is[i] = BEGINS; heard[i] = 0; passed_on[i] = 0 }

#ifdef PASSED_ON_FOR_EVER
#define PASSES_ON(i) true
#else
#define PASSES_ON(i) (passed_on[i] < MAX_PASSED_ON)
#endif

inline pass_on(i) {
  printf("process %d passes it on\n", i);
  y = (passed_on[i] < MAX_PASSED_ON -> passed_on[i] + 1 : MAX_PASSED_ON); heard[i] = 0; passed_on[i] = 0;
  push(y); y = 0
}

#define LIVES(i) (!frozen[i] && !dead[i])

proctype Process(byte i) {
  byte x, y, oldest;
away:
end:
  atomic { is[i] == AWAY && !STANDS(i) && key != TOKEN(i) && MAY_COME(i) -> COME;
    is[i] = BEGINS; printf("process %d: a copy comes\n", i) }
here:
  if
  :: atomic { is[i] == BEGINS && LIVES(i) && !no_slot[i] ->
      if
      :: key == 0 ->
        key = TOKEN(i); left = TTL; is[i] = HOLDS; lasted[i] = 0; idle = 0; unheard = 0; clear_wake();
        tidy(i);
        printf("process %d: its copy has the lock\n", i)
      :: else ->
        if
        :: rank[i] == 0 ->
          for (y : 0 .. PROCESSES - 1) { rank[i] = (rank[y] > rank[i] -> rank[y] : rank[i]) }
          y = 0; rank[i]++
        :: else
        fi;
        is[i] = (heard[i] || blocked??[eval(i)] -> BLOCKS : PARKED);
        printf("process %d: its copy is parked: held by %d\n", i, key)
      fi }; goto here
  /* It has begun, but does not need the lock: it was revoked. */
  :: atomic { is[i] == BEGINS && LIVES(i) && rank[i] && !IS_PATIENT(i) ->
      printf("process %d: its copy was revoked, and gives back\n", i); is[i] = AWAY;
#ifndef NOT_GIVEN_BACK
      push(0);
#endif
      tidy(i) }; goto away
  :: atomic { (is[i] == PARKED || is[i] == BLOCKS && due[i] == 0 && !heard[i]) && LIVES(i) ->
      unblock(i);
      noted[i] = PLACE; waiting = WAITING; due[i] = REFRESH; is[i] = BLOCKS;
      blocked!i;
#ifndef NEVER_LOOKS
      if
      :: key == 0 -> call(i)
      :: else
      fi;
#endif
      serve();
      printf("process %d takes its place: held by %d\n", i, key) }; goto here
  /* It blocks again without a look. */
  :: atomic { is[i] == LISTENS && LIVES(i) -> is[i] = BLOCKS; blocked!i; serve() }; goto here
  :: atomic { is[i] == BLOCKS && heard[i] && LIVES(i) ->
      oldest = NOBODY;
      for (y : 0 .. PROCESSES - 1) {
        if
        :: oldest == NOBODY && IS_OLDER(y, i) -> oldest = y
        :: oldest != NOBODY && IS_OLDER(y, oldest) -> oldest = y
        :: else
        fi
      }
      y = 0;
      printf("process %d was woken; the oldest place is that of %d\n", i, oldest);
      if
#ifdef TAKES_IN_ANY_ORDER
      :: oldest != NOBODY -> call(i)
#else
      :: oldest != NOBODY && PASSES_ON(i) -> is[i] = LISTENS; pass_on(i)
      :: oldest != NOBODY && !PASSES_ON(i) -> noted[oldest] = ZERO; tidy(oldest); call(i)
#endif
      :: oldest == NOBODY -> call(i)
      :: MAY_FAIL(i) && (oldest == NOBODY || !PASSES_ON(i)) -> FAIL;
        printf("process %d has no slot\n", i);
        if
        :: PASSES_ON(i) -> is[i] = LISTENS; pass_on(i)
        :: else -> call(i); no_slot[i] = 1; unheard = 1
        fi
      fi;
#ifdef OVERTAKEN
      overtaken = (is[i] == BEGINS && oldest == 0 -> overtaken + 1 : overtaken);
      assert(overtaken <= OVERTAKEN);
#endif
      oldest = 0 }; goto here
  :: atomic { no_slot[i] -> no_slot[i] = 0 }; goto here
  :: atomic { is[i] == HOLDS && lasted[i] -> is[i] = AWAY; lasted[i] = 0; due[i] = 0; free(i); tidy(i); printf("process %d frees: held by %d\n", i, key) };
    goto away
  /* A warm shutdown; or its copy has expired. */
  :: atomic { (is[i] == PARKED || is[i] == LISTENS || is[i] == BLOCKS) && LIVES(i) && !IS_PATIENT(i) ->
      is[i] = AWAY; tidy(i); printf("process %d leaves\n", i) }; goto away
  :: atomic { MAY_FAIL(i) -> FAIL;
      unheard = unheard || heard[i] || is[i] == BEGINS;
      is[i] = AWAY; dead[i] = 1; frozen[i] = 0; no_slot[i] = 0; heard[i] = 0; passed_on[i] = 0; due[i] = 0; tidy(i);
      printf("process %d dies\n", i) }; goto away
  :: atomic { !frozen[i] && is[i] != HOLDS && MAY_FAIL(i) -> FAIL;
      unheard = unheard || heard[i] || is[i] == BEGINS;
      frozen[i] = 1; printf("process %d is frozen\n", i) }; goto here
  :: atomic { frozen[i] -> frozen[i] = 0; printf("process %d goes on\n", i) }; goto here
  fi
}

/* Its copy is not in the timer any more: the thread leaves the line, and passes on a wake-up that came meanwhile. */
#define IS_TO_LEAVE(i) (LIVES(i) && STANDS(i) && (is[i] == BEGINS || is[i] == HOLDS || is[i] == AWAY))

proctype Thread(byte i) {
  byte x, y;
end:
  do
  :: atomic { IS_TO_LEAVE(i) ->
      unblock(i); noted[i] = NONE; due[i] = 0;
      if
#ifdef LEAVES_WITH_LAST
      :: heard[i] && !PASSES_ON(i) -> heard[i] = 0; passed_on[i] = 0
      :: heard[i] && PASSES_ON(i) -> pass_on(i)
#else
      :: heard[i] -> pass_on(i)
#endif
      :: else
      fi;
      tidy(i);
      printf("process %d has left the line\n", i) }
  :: atomic { dead[i] && blocked??[eval(i)] -> unblock(i); tidy(i); printf("server: the connection of process %d is closed\n", i) }
  od
}

#ifdef NEVER_LOOKS
#define IS_DUE(i) false
#else
#define IS_DUE(i) (due[i] == 0)
#endif
#define IS_BUSY(i) (IS_TO_LEAVE(i) || LIVES(i) && (is[i] == PARKED || is[i] == LISTENS || \
  is[i] == BEGINS && !no_slot[i] || is[i] == BLOCKS && (heard[i] || IS_DUE(i))))
#define WAITS(i) (is[i] == BLOCKS && LIVES(i))

proctype Time() {
  byte i, x, y;
  do
  :: atomic { !IS_BUSY(0) && !IS_BUSY(1) && !IS_BUSY(2) ->
      printf("a tick: held by %d, %d left\n", key, left);
      idle = (key == 0 && (WAITS(0) || WAITS(1) || WAITS(2)) -> idle + 1 : 0);
      assert(!idle || unheard);         /* A freed lock is taken at once. */
      assert(idle <= REFRESH);          /* A lock that ended by itself, or whose wake-up was not heard, is found. */
      for (i : 0 .. PROCESSES - 1) {
        lasted[i] = (is[i] == HOLDS -> 1 : 0);
        due[i] = (due[i] -> due[i] - 1 : 0)
      }
      i = 0;
      if
      :: key && is[key - 1] != HOLDS ->
        left--;
        if
        :: left == 0 -> key = 0; unheard = 1
        :: else
        fi
      :: else
      fi;
      if
      :: wake_left == 1 -> clear_wake(); unheard = 1
      :: wake_left > 1 -> wake_left--
      :: else
      fi;
      waiting = (waiting -> waiting - 1 : 0);
      if
      :: waiting == 0 ->
        noted[0] = NONE; noted[1] = NONE; noted[2] = NONE;
        tidy(0); tidy(1); tidy(2)
      :: else
      fi
    }
  od
}

init {
  byte i;
  atomic {
    for (i : 0 .. PROCESSES - 1) { run Thread(i); run Process(i) }
    i = 0;
    run Time()
  }
}

ltl begun { [] (is[0] == BLOCKS -> <> (is[0] == HOLDS)) }
