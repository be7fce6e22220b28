/* Waiting for a lock: places, wake-ups that are only hints, and looks (docs/protocol.md, sections 7 and 11).

   Waiters are numbered by since when they wait. A second is a step of the clock, which advances when nothing else is to be done. A newcomer does not wait.

   FAULTS: how many wake-ups are lost, and waiters die. LOOK, LIVE, COMES: in seconds.
   NEVER_LOOKS, FREE_WAKES_NOBODY, TAKES_IN_ANY_ORDER, DEAD_FOR_EVER, LEAVES_SILENTLY: what a variant leaves out. PATIENT: nobody gives up. */
#define N 3
#define NOBODY 9
#ifndef FAULTS
#define FAULTS 1
#endif
#ifndef LOOK
#define LOOK 1
#endif
#ifndef LIVE
#define LIVE 4
#endif
#ifndef COMES
#define COMES 1
#endif
#ifndef COMING
#define COMING 2
#endif

mtype = {WAITS, HOLDS, GONE, DEAD};
mtype is[N];
bool place[N], pushed[N], mail[N];
byte there[N];                       /* Seconds for which it counts, unless it asks again. */
byte look[N];
byte holder = NOBODY, left;          /* Seconds that the holder still has it. */
byte idle, faults = FAULTS, coming = COMING;
bool known[N];                       /* Whether it had a place before the lock was freed last. */

#define MAY_COME(i) (is[i] == WAITS && place[i] && there[i])

inline next() {
  j = 0;
  do
  :: j < N && !(place[j] && there[j]) -> place[j] = false; j++
  :: j < N && place[j] && there[j] ->
#ifndef DEAD_FOR_EVER
     if :: there[j] > COMES -> there[j] = COMES :: else fi;
#else
     there[j] = LIVE;
#endif
     printf("%d is woken\n", j);
     pushed[j] = true; break
  :: j == N -> break
  od
}

inline free() {
  printf("the lock is freed\n");
  holder = NOBODY; idle = 0;
  known[0] = MAY_COME(0); known[1] = MAY_COME(1); known[2] = MAY_COME(2);
#ifndef FREE_WAKES_NOBODY
  next();
#endif
  j = 0
}

/* Whether a waiter with an older place is there. */
#ifdef TAKES_IN_ANY_ORDER
#define IS_BEHIND(i) false
#else
#define IS_BEHIND(i) ((i > 0 && place[0] && there[0]) || (i > 1 && place[1] && there[1]))
#endif

inline ask(i) {
  mail[i] = false; look[i] = LOOK;
  if
  :: holder == NOBODY && !IS_BEHIND(i) ->
     /* Nobody who is well, and was there, is passed over. */
     assert(FAULTS > 0 || !((i > 0 && is[0] == WAITS && known[0]) || (i > 1 && is[1] == WAITS && known[1])));
     printf("%d takes the lock\n", i);
     holder = i; is[i] = HOLDS; place[i] = false; left = 1; idle = 0
  :: else -> printf("%d waits\n", i); place[i] = true; there[i] = LIVE
  fi
}

proctype Waiter(byte i) {
  byte j;
  atomic { is[i] = WAITS; ask(i) }
  do
  :: atomic { is[i] == WAITS && mail[i] -> ask(i) }
#ifndef NEVER_LOOKS
  :: atomic { is[i] == WAITS && !look[i] -> ask(i) }
#endif
  :: atomic { is[i] == HOLDS && holder == i && !left -> is[i] = GONE; free() }
#ifndef PATIENT
  :: atomic { is[i] == WAITS && i == 0 && coming < COMING ->   /* It gives up. */
       is[i] = GONE;
#ifndef LEAVES_SILENTLY
       if :: place[i] && there[i] <= COMES -> place[i] = false; next() :: else -> place[i] = false fi
#else
       place[i] = false; there[i] = 0
#endif
     }
  :: atomic { is[i] == WAITS && faults -> faults--; printf("%d dies\n", i); is[i] = DEAD; mail[i] = false }
#endif
  :: is[i] == GONE || is[i] == DEAD -> break
  od
}

proctype Newcomer() {
  byte j;
end:
  do
  :: atomic { coming && holder == NOBODY -> coming--; holder = N; left = 1; idle = 0 }
  :: atomic { holder == N && !left -> free() }
  od
}

/* What was pushed arrives, or is lost. */
proctype Mailbox() {
end:
  do
  :: atomic { pushed[0] -> pushed[0] = false; if :: is[0] == WAITS -> mail[0] = true :: else fi }
  :: atomic { pushed[1] -> pushed[1] = false; if :: is[1] == WAITS -> mail[1] = true :: else fi }
  :: atomic { pushed[2] -> pushed[2] = false; if :: is[2] == WAITS -> mail[2] = true :: else fi }
  :: atomic { faults && pushed[0] -> faults--; pushed[0] = false }
  :: atomic { faults && pushed[1] -> faults--; pushed[1] = false }
  :: atomic { faults && pushed[2] -> faults--; pushed[2] = false }
  od
}

#ifdef NEVER_LOOKS
#define DUE(i) (is[i] == WAITS && mail[i])
#else
#define DUE(i) (is[i] == WAITS && (mail[i] || !look[i]))
#endif
#define WAITING(i) (is[i] == WAITS && place[i])

proctype Clock() {
  byte i;
end:
  do
  :: atomic {
       !(DUE(0) || DUE(1) || DUE(2) || pushed[0] || pushed[1] || pushed[2]) && (holder == NOBODY || left) &&
       is[0] && is[1] && is[2] && (WAITING(0) || WAITING(1) || WAITING(2) || holder != NOBODY) ->
       if :: holder != NOBODY -> left = 0 :: else ->
          if :: WAITING(0) || WAITING(1) || WAITING(2) -> idle++ :: else fi
       fi;
       /* A lost wake-up, or one that went to a waiter that is gone, costs two seconds. */
       assert(idle <= 2 * FAULTS);
       printf("a second later\n");
       i = 0;
       do
       :: i < N ->
          if :: there[i] -> there[i]-- :: else fi;
          if :: look[i] -> look[i]-- :: else fi;
          i++
       :: else -> break
       od;
       i = 0
     }
  :: (is[0] == GONE || is[0] == DEAD) && (is[1] == GONE || is[1] == DEAD) && (is[2] == GONE || is[2] == DEAD) && holder == NOBODY -> break
  od
}

init { atomic { run Waiter(0); run Waiter(1); run Waiter(2); run Newcomer(); run Mailbox(); run Clock() } }

ltl served { [] (is[2] == WAITS -> <> (is[2] != WAITS)) }
