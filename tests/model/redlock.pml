/* One lock on a majority of nodes that do not know each other, and of which one may come back empty.
 *
 * Each node carries out a client's request at some moment; once the client stops waiting for it, the request is lost, or
 * arrives late, in any order, at most LATE times. A node that is down or cut off is one that nothing reaches for a
 * while, and a node that comes back with its data has merely been slow: only the loss of a node's data is a separate
 * step. Each node carries out a request that is repeated until it is answered (the undoing of an attempt, a release) at
 * some moment, or never.
 *
 * Client 0 takes the lock once, in two attempts, each under an owner of its own, renews, and frees; its clock may be slow.
 * Client 1 takes all it gets.
 * With FENCES, the model also has the counters of fencing tokens, seeded by clocks that may say anything.
 */

#define NODES 3
#define QUORUM 2
#ifndef TTL
#define TTL 3
#endif
#ifndef DRIFT
#define DRIFT 1
#endif
#ifndef SLOW
#define SLOW 1
#endif
#define TRUST (TTL - DRIFT)
#ifndef RESTARTS
#define RESTARTS 1
#endif
#ifndef LATE
#define LATE 1
#endif
#ifndef RENEWALS
#define RENEWALS 1
#endif

/* A node's hold: free, or that of the owner of a client's attempt. */
#define FREE 0
#define HOLD(i, attempt) (2 * i + attempt)
#define IS_OF(i, hold) (hold && (hold - 1) / 2 == i)
#ifdef UNDO_OF_ANY_ATTEMPT
#define IS_UNDONE(i, hold, attempt) IS_OF(i, hold)
#else
#define IS_UNDONE(i, hold, attempt) (hold == HOLD(i, attempt))
#endif
/* A node that has not been asked since it lost its data. */
#define UNASKED (TTL + 1)

/* The request that a client waits for, and to which an answer belongs. */
#define NOTHING 0
#define ATTEMPT_1 1
#define ATTEMPT_2 2
#define RENEWAL 3
#define RAISING 4
#define PUTTING_BACK 5

#define AT(i, n) (i * NODES + n)
#define BIT(what) (1 << what)

mtype = { SILENCE, OURS, NOT_OURS };

/* The nodes. */
byte hold[NODES], left[NODES], no_vote[NODES];
bit over_1[6], over_2[6];               /* :tombstone:<owner>, of the owner of each attempt, by AT */
byte restarts, late;

/* The network, and the clients. */
byte sent[6];
mtype answer[6] = SILENCE;
byte awaited[2], failed[2];             /* the number of failed attempts */
byte asks_as[2];                        /* the attempt whose owner is the client's */
bit ended[2];
byte trusted[2], trusted_by_answer[2], lag, lag_by_answer;

#ifdef FENCES
byte counter[NODES], fence_of[6], last_fence;
#endif

#define COUNT(i, what) ((answer[AT(i, 0)] == what) + (answer[AT(i, 1)] == what) + (answer[AT(i, 2)] == what))

/* Data without any further effect need not be kept: fewer states, and no step is lost. */
inline tidy(i, n) {
  over_1[AT(i, n)] = over_1[AT(i, n)] && (sent[AT(i, n)] & (BIT(ATTEMPT_1) | BIT(PUTTING_BACK)));
  over_2[AT(i, n)] = over_2[AT(i, n)] && (sent[AT(i, n)] & (BIT(ATTEMPT_2) | BIT(PUTTING_BACK)));
  if
  :: ended[i] && !(sent[AT(i, n)] & (BIT(ATTEMPT_1) | BIT(ATTEMPT_2) | BIT(PUTTING_BACK))) -> sent[AT(i, n)] = 0
  :: else
  fi
}

/* The client waits no longer for its request: it is lost, or late. */
inline turn_away(i) {
  for (n : 0 .. NODES - 1) {
    if
    :: awaited[i] != NOTHING && (sent[AT(i, n)] & BIT(awaited[i])) ->
      if
      :: sent[AT(i, n)] = sent[AT(i, n)] & ~BIT(awaited[i])
      :: late < LATE && awaited[i] != RENEWAL -> late++; printf("what client %d sent to node %d will be late\n", i, n)
      fi
    :: else
    fi;
    answer[AT(i, n)] = SILENCE
  }
  n = 0; awaited[i] = NOTHING; trusted_by_answer[i] = 0;
  if
  :: i == 0 -> lag_by_answer = 0
  :: else
  fi
}

inline ask_all(i, what) {
  awaited[i] = what; trusted_by_answer[i] = TRUST;
  for (n : 0 .. NODES - 1) { sent[AT(i, n)] = sent[AT(i, n)] | BIT(what) }
  n = 0
}

inline believe(i) {
  trusted[i] = trusted_by_answer[i];
#ifdef TRUST_FROM_ANSWER
  trusted[i] = TRUST; lag_by_answer = 0;
#endif
  if
  :: i == 0 -> lag = lag_by_answer
  :: else
  fi;
  turn_away(i)
}

inline finish(i) {
  trusted[i] = 0;
  if
  :: i == 0 -> lag = 0
  :: else
  fi;
  turn_away(i);
  ended[i] = 1;
#ifdef FENCES
  fence_of[AT(i, 0)] = 0; fence_of[AT(i, 1)] = 0; fence_of[AT(i, 2)] = 0;
#endif
  for (n : 0 .. NODES - 1) { tidy(i, n) }
  n = 0
}

/* The steps of a node. */

inline clear(n) { hold[n] = FREE; left[n] = 0 }

inline say(i, n, what, said) {
  if
  :: awaited[i] == what -> answer[AT(i, n)] = said
  :: else
  fi
}

#define HAS(i, n) (hold[n] == HOLD(i, asks_as[i]))
#define IS_OVER(i, n) (asks_as[i] == 1 && over_1[AT(i, n)] || asks_as[i] == 2 && over_2[AT(i, n)])

/* `names`: the attempt names the owner of the one before. */
inline acquire(i, n, attempt, is_over, names) {
  sent[AT(i, n)] = sent[AT(i, n)] & ~BIT(attempt);
  if
  :: is_over -> say(i, n, attempt, NOT_OURS)
#ifndef AMNESIA_VOTES
  :: !is_over && no_vote[n] && hold[n] == FREE -> say(i, n, attempt, NOT_OURS)
  :: !is_over && !(no_vote[n] && hold[n] == FREE) ->
#else
  :: else ->
#endif
    if
    :: names ->
      over_1[AT(i, n)] = 1;
      if
      :: hold[n] == HOLD(i, 1) -> clear(n)
      :: else
      fi
    :: else
    fi;
    if
    :: hold[n] == FREE || hold[n] == HOLD(i, attempt) ->
#ifdef FENCES
      if
      :: hold[n] == FREE ->
        if
        :: counter[n]++
#ifdef SEEDS
        :: counter[n] < SEEDS -> counter[n] = SEEDS
#endif
        fi
      :: else
      fi;
      if
      :: awaited[i] == attempt -> fence_of[AT(i, n)] = counter[n]
      :: else
      fi;
#endif
      hold[n] = HOLD(i, attempt);
      left[n] = TTL; say(i, n, attempt, OURS)
    :: else -> say(i, n, attempt, NOT_OURS)
    fi
  fi;
  if
  :: no_vote[n] == UNASKED -> no_vote[n] = TTL
  :: else
  fi;
  printf("node %d: acquire of client %d, attempt %d; it has %d\n", n, i, attempt, hold[n])
}

/* An owner whose attempt has failed, or that has freed the lock. */
#define IS_GONE(i, attempt) (failed[i] >= attempt || ended[i])
#define MAY_COME(i, n, attempt) (sent[AT(i, n)] & (BIT(attempt) | BIT(PUTTING_BACK)))

inline let_go(i, n, attempt) {
  if
  :: IS_UNDONE(i, hold[n], attempt) -> clear(n)
  :: else
  fi;
  printf("node %d: the owner of attempt %d of client %d is over; it has %d\n", n, attempt, i, hold[n])
}

inline carry_out(i, n) {
  if
  :: sent[AT(i, n)] & BIT(ATTEMPT_1) -> acquire(i, n, 1, over_1[AT(i, n)], 0)
  :: sent[AT(i, n)] & BIT(ATTEMPT_2) -> acquire(i, n, 2, over_2[AT(i, n)], 1)
  :: sent[AT(i, n)] & BIT(RENEWAL) -> sent[AT(i, n)] = sent[AT(i, n)] & ~BIT(RENEWAL);
     if
     :: HAS(i, n) -> left[n] = TTL; say(i, n, RENEWAL, OURS)
     :: else -> say(i, n, RENEWAL, NOT_OURS)
     fi;
     printf("node %d: renewal of client %d; it has %d\n", n, i, hold[n])
  :: sent[AT(i, n)] & BIT(PUTTING_BACK) -> sent[AT(i, n)] = sent[AT(i, n)] & ~BIT(PUTTING_BACK);
     if
#ifdef PUT_BACK_AFTER_END
     :: hold[n] == FREE ->
#else
     :: hold[n] == FREE && !IS_OVER(i, n) ->
#endif
        assert(!IS_OVER(i, n));         /* A freed hold is not put back. */
        hold[n] = HOLD(i, asks_as[i]); left[n] = TTL;
        printf("node %d: the hold of client %d is put back\n", n, i)
     :: else
     fi
#ifdef FENCES
  :: sent[AT(i, n)] & BIT(RAISING) -> sent[AT(i, n)] = sent[AT(i, n)] & ~BIT(RAISING);
     if
     :: HAS(i, n) ->
        if
        :: counter[n] < fence_of[AT(i, n)] -> counter[n] = fence_of[AT(i, n)]
        :: else
        fi;
        say(i, n, RAISING, OURS)
     :: else -> say(i, n, RAISING, NOT_OURS)
     fi;
     printf("node %d: counter is %d, raised by client %d\n", n, counter[n], i)
#endif
  :: IS_GONE(i, 1) && (IS_UNDONE(i, hold[n], 1) || MAY_COME(i, n, ATTEMPT_1) && !over_1[AT(i, n)]) ->
     let_go(i, n, 1); over_1[AT(i, n)] = 1
  :: IS_GONE(i, 2) && (IS_UNDONE(i, hold[n], 2) || MAY_COME(i, n, ATTEMPT_2) && !over_2[AT(i, n)]) ->
     let_go(i, n, 2); over_2[AT(i, n)] = 1
  fi;
  tidy(i, n)
}

proctype Node(byte n) {
end:
  do
  :: atomic { carry_out(0, n) }
  :: atomic { carry_out(1, n) }
#if RESTARTS > 0
  :: atomic { n == 0 && restarts < RESTARTS ->
      restarts++; clear(n); no_vote[n] = UNASKED;
      over_1[AT(0, n)] = 0; over_2[AT(0, n)] = 0; over_1[AT(1, n)] = 0; over_2[AT(1, n)] = 0;
#ifdef FENCES
      counter[n] = 0;
#endif
      printf("node %d comes back empty\n", n) }
#endif
  od
}

inline put_back_where_missing(i) {
  for (n : 0 .. NODES - 1) {
    if
    :: answer[AT(i, n)] == NOT_OURS -> sent[AT(i, n)] = sent[AT(i, n)] | BIT(PUTTING_BACK)
    :: else
    fi
  }
  n = 0
}

#ifdef FENCES
inline count_fence(i) {
  fence = fence_of[AT(i, 0)];
  if
  :: fence_of[AT(i, 1)] > fence -> fence = fence_of[AT(i, 1)]
  :: else
  fi;
  if
  :: fence_of[AT(i, 2)] > fence -> fence = fence_of[AT(i, 2)]
  :: else
  fi;
  agreed = (fence_of[AT(i, 0)] == fence) + (fence_of[AT(i, 1)] == fence) + (fence_of[AT(i, 2)] == fence)
}
#endif

#ifdef RENEWED_BY_ONE
#define RENEWED_BY 1
#else
#define RENEWED_BY QUORUM
#endif

proctype Client(byte i) {
  byte n;
  byte renewed;
#ifdef FENCES
  byte fence, agreed;
#endif
  atomic { asks_as[i] = 1; ask_all(i, ATTEMPT_1); printf("client %d asks all nodes, attempt 1\n", i) }
  do
#ifndef FENCES
  :: atomic { awaited[i] <= ATTEMPT_2 && COUNT(i, OURS) >= QUORUM && trusted_by_answer[i] > 1 ->
      believe(i); printf("client %d has the lock, trusted for %d\n", i, trusted[i]) }
#else
  :: atomic { awaited[i] <= ATTEMPT_2 && COUNT(i, OURS) >= QUORUM && trusted_by_answer[i] > 1 ->
      count_fence(i);
      turn_away(i);
      trusted_by_answer[i] = 2;
      if
#ifdef FENCE_NOT_RAISED
      :: true -> awaited[i] = RAISING; answer[AT(i, 0)] = OURS; answer[AT(i, 1)] = OURS
#else
      :: agreed >= QUORUM -> awaited[i] = RAISING; answer[AT(i, 0)] = OURS; answer[AT(i, 1)] = OURS
      :: else ->
        ask_all(i, RAISING);
        for (n : 0 .. NODES - 1) { fence_of[AT(i, n)] = fence }
        n = 0;
        printf("client %d was granted fence %d, and raises the counters to it\n", i, fence)
#endif
      fi;
      agreed = 0 }
  :: atomic { awaited[i] == RAISING && COUNT(i, OURS) >= QUORUM && trusted_by_answer[i] > 1 ->
      printf("client %d has the lock, with fence %d; the last one was %d\n", i, fence, last_fence);
      assert(fence > last_fence);
      last_fence = fence; fence = 0;
      believe(i) }
#endif
  :: atomic { i == 0 && awaited[i] == ATTEMPT_1 ->
      turn_away(i); failed[i]++; asks_as[i] = 2; ask_all(i, ATTEMPT_2);
      printf("client %d takes attempt 1 back, and asks all nodes, attempt 2\n", i) }
  :: atomic { awaited[i] != NOTHING && !trusted[i] && !(i == 0 && awaited[i] == ATTEMPT_1) ->
      finish(i); printf("client %d gives up\n", i); break }
#ifndef FENCES
  :: atomic { i == 0 && awaited[i] == NOTHING && trusted[i] && renewed < RENEWALS ->
      ask_all(i, RENEWAL); printf("client %d renews\n", i) }
  :: atomic { awaited[i] == RENEWAL && trusted[i] && COUNT(i, OURS) >= RENEWED_BY ->
      put_back_where_missing(i);
      believe(i); renewed++; printf("client %d is renewed, trusted for %d\n", i, trusted[i]) }
  :: atomic { awaited[i] == RENEWAL ->
#ifdef PUT_BACK_WITHOUT_QUORUM
      put_back_where_missing(i);
#endif
      turn_away(i); printf("client %d hears too little of its renewal\n", i) }
#endif
  :: atomic { awaited[i] == NOTHING ->
      finish(i); renewed = 0; printf("client %d ends its body, and frees\n", i); break }
  od
}

inline count_down(i) {
  if
  :: trusted[i] -> trusted[i]--
  :: else
  fi;
  if
  :: trusted_by_answer[i] -> trusted_by_answer[i]--
  :: else
  fi
}

proctype Time() {
  byte n;
end:
  do
  :: atomic {
      left[0] || left[1] || left[2] || no_vote[0] && no_vote[0] != UNASKED ->
      if
      :: lag < SLOW && lag_by_answer < SLOW && (trusted[0] || trusted_by_answer[0]) ->
        lag = lag + (trusted[0] > 0); lag_by_answer = lag_by_answer + (trusted_by_answer[0] > 0);
        printf("a tick, which the clock of client 0 misses\n")
      :: true -> count_down(0); printf("a tick\n")
      fi;
      count_down(1);
      for (n : 0 .. NODES - 1) {
        if
        :: left[n] == 1 -> clear(n); printf("node %d: the hold has ended\n", n)
        :: left[n] > 1 -> left[n]--
        :: else
        fi;
        tidy(0, n); tidy(1, n);
        if
        :: no_vote[n] && no_vote[n] != UNASKED -> no_vote[n]--
        :: else
        fi
      }
      n = 0
    }
  od
}

proctype Watch() {
end:
  atomic {
    trusted[0] && trusted[1] ->
    printf("VIOLATED: both clients trust their lease, for %d and %d; the nodes have %d %d %d\n",
      trusted[0], trusted[1], hold[0], hold[1], hold[2]);
    assert(false)
  }
}

init {
  atomic { run Node(0); run Node(1); run Node(2); run Client(0); run Client(1); run Time(); run Watch() }
}

ltl free_again { <>[] (hold[0] == FREE && hold[1] == FREE && hold[2] == FREE) }
