/* One lock on one server, and owners whose requests arrive late, or never.
 *
 * Time is the rest of each time to live; a tick counts all of them down at once. A request is carried out at some
 * moment, or lost when its sender dies; an answer is read at some moment, or given up. Nothing here bounds how often
 * anything happens: owners go on forever, with a fresh token for each delivery.
 *
 * An owner has two tokens: NOW(i) belongs to its delivery; PAST(i) still has requests on their way, or is held. When the
 * owner asks again, the rest of NOW(i) is renamed PAST(i), and NOW(i) is fresh, as random tokens are.
 */

#ifndef OWNERS
#define OWNERS 2
#endif
#ifndef TTL
#define TTL 3
#endif
/* By how much the clocks of a holder and of the server may differ over a ttl, and the margin that trust leaves for it. */
#ifndef SLOW
#define SLOW 1
#endif
#ifndef DRIFT
#define DRIFT 1
#endif
#define TRUST (TTL - DRIFT)
/* The maximum number of successful renewals of one body: each body ends at some time. */
#ifndef RENEWALS
#define RENEWALS 1
#endif

#define TOKENS (2 * OWNERS + 1)
#define NOW(i) (2 * i + 1)
#define PAST(i) (2 * i + 2)

mtype = { NOTHING, YES, NO };
mtype = { FIRST_TRY, SECOND_TRY, RENEWAL };

/* The server. */
byte key, left;                 /* the token that holds the lock; 0: free */
bit over[TOKENS];               /* :tombstone:<token>: it keeps what it has, and takes nothing */
bit has_no_ttl;

/* On the way to the server, by token. */
bit first[TOKENS], second[TOKENS], release[TOKENS], abandon[TOKENS];
bit renewal[TOKENS];

/* The owners. */
bit body[OWNERS];
byte trusted[OWNERS], trusted_by_answer[OWNERS];    /* ticks left; the second, if the awaited answer is a yes */
byte lag[OWNERS], lag_by_answer[OWNERS];            /* ticks that its clock has missed since then */
mtype awaited[OWNERS] = NOTHING;
mtype answer[OWNERS] = NOTHING;

/* A token that was given up, or freed, may not hold the lock later. */
bit is_over[TOKENS];

#define IS_ON_ITS_WAY(t) (first[t] || second[t] || release[t] || abandon[t] || renewal[t])
#define OWNER_OF(t) ((t - 1) / 2)

/* Whether a token still has requests on their way, or the lock. */
#define IS_LEFT(t) (IS_ON_ITS_WAY(t) || key == t)

inline forget(t) { over[t] = 0; is_over[t] = 0 }

/* Requests that have no effect any more, and whose answers nobody awaits, need not arrive: fewer states, and no step is
 * lost. The variants in which they could do harm keep them.
 */
inline tidy(t) {
#if !defined(FREE_UNCHECKED) && !defined(RENEW_CREATES)
  if
  :: key != t && !first[t] && !second[t] && (t % 2 == 0 || awaited[OWNER_OF(t)] == NOTHING) ->
    renewal[t] = 0; release[t] = 0; abandon[t] = 0; forget(t)
  :: else
  fi
#else
  skip
#endif
}

inline rename(t, u) {
  first[u] = first[t]; second[u] = second[t]; renewal[u] = renewal[t]; release[u] = release[t]; abandon[u] = abandon[t];
  over[u] = over[t]; is_over[u] = is_over[t];
  first[t] = 0; second[t] = 0; renewal[t] = 0; release[t] = 0; abandon[t] = 0;
  forget(t);
  if
  :: key == t -> key = u
  :: else
  fi;
  printf("what is left of token %d is called token %d from now on\n", t, u)
}

inline ask_from(i) {
  trusted_by_answer[i] = TRUST;
  lag_by_answer[i] = 0;
  answer[i] = NOTHING
}

inline believe(i) {
#ifdef TRUST_FROM_ANSWER
  trusted[i] = TRUST; lag[i] = 0;
#else
  trusted[i] = trusted_by_answer[i]; lag[i] = lag_by_answer[i];
#endif
  trusted_by_answer[i] = 0; lag_by_answer[i] = 0; awaited[i] = NOTHING; answer[i] = NOTHING
}

inline no_longer(i) {
  trusted[i] = 0; lag[i] = 0; trusted_by_answer[i] = 0; lag_by_answer[i] = 0;
  body[i] = 0; awaited[i] = NOTHING; answer[i] = NOTHING
}

/* The answer to a request of token `t`, if its owner still awaits it. */
inline say(t, what, said) {
  if
  :: t % 2 == 1 && awaited[OWNER_OF(t)] == what ->
    answer[OWNER_OF(t)] = said;
    if
    :: said == NO -> trusted_by_answer[OWNER_OF(t)] = 0; lag_by_answer[OWNER_OF(t)] = 0
    :: else
    fi
  :: else
  fi
}

inline take(t, what) {
  if
  :: over[t] && key != t -> say(t, what, NO)
  :: else ->
    if
    :: key == 0 || key == t ->
      assert(!is_over[t]);
      key = t; left = TTL;
#ifdef HOLD_WITHOUT_TTL
      has_no_ttl = 1;
#endif
#ifndef NO_TOMBSTONE_AT_GRANT
      if
      :: what == SECOND_TRY -> over[t] = 1
      :: else
      fi;
#endif
      say(t, what, YES)
    :: else -> say(t, what, NO)
    fi
  fi
}

inline clear() { key = 0; left = 0; has_no_ttl = 0 }

/* The network and the server: carry out the requests of one owner in any order. */
proctype Wire(byte i) {
  byte t;
  do
  :: atomic {
      t = 2 * i + 1;
      if
      :: IS_ON_ITS_WAY(t)
      :: IS_ON_ITS_WAY(t + 1) -> t++
      fi;
      if
      :: first[t] -> first[t] = 0; take(t, FIRST_TRY);
         printf("server: acquire of token %d, first try: held by %d\n", t, key)
      :: second[t] -> second[t] = 0; take(t, SECOND_TRY);
         printf("server: acquire of token %d, second try: held by %d\n", t, key)
      :: renewal[t] -> renewal[t] = 0;
         if
#ifdef RENEW_CREATES
         :: key == t || key == 0 -> assert(!is_over[t]); key = t; left = TTL; say(t, RENEWAL, YES)
#else
         :: key == t -> left = TTL; say(t, RENEWAL, YES)
#endif
         :: else -> say(t, RENEWAL, NO)
         fi;
         printf("server: renewal of token %d: held by %d, %d left\n", t, key, left)
      :: release[t] -> release[t] = 0;
         if
#ifdef FREE_UNCHECKED
         :: key != 0 -> clear()
#else
         :: key == t -> clear()
#endif
         :: else
         fi;
         is_over[t] = 1;
         printf("server: free of token %d: held by %d\n", t, key)
      :: abandon[t] -> abandon[t] = 0;
         if
         :: key == t -> clear()
         :: else
         fi;
#ifndef NO_OVER
         over[t] = 1;
#endif
         is_over[t] = 1;
         printf("server: token %d is given up: held by %d\n", t, key)
      fi;
      tidy(NOW(i));
      tidy(PAST(i));
      t = 0
    }
  od
}

/* Its process dies, and its requests arrive, or do not. Its main process gives the token up, or dies with it. */
inline die(i) {
  no_longer(i);
  if
  :: true
  :: first[NOW(i)] = 0; second[NOW(i)] = 0; renewal[NOW(i)] = 0
  fi;
  if
  :: abandon[NOW(i)] = 1; printf("owner %d dies; its main process gives token %d up\n", i, NOW(i))
  :: true -> printf("owner %d dies, and its main process\n", i)
  fi
}

inline free(i) { no_longer(i); release[NOW(i)] = 1; renewed = 0 }

proctype Owner(byte i) {
  byte renewed;
idle:
  atomic {
    if
    :: !IS_LEFT(NOW(i)) -> forget(NOW(i))
    :: IS_LEFT(NOW(i)) && !IS_LEFT(PAST(i)) -> rename(NOW(i), PAST(i))
    fi;
    ask_from(i); awaited[i] = FIRST_TRY; first[NOW(i)] = 1;
    printf("owner %d asks, as token %d\n", i, NOW(i))
  }
asking:
  if
  :: atomic { answer[i] == YES && trusted_by_answer[i] > 1 ->
      believe(i); body[i] = 1;
      printf("owner %d has the lock, trusted for %d; its body begins\n", i, trusted[i]) };
      goto holding
#ifdef REFUSED_WITHOUT_TOMBSTONE
  :: atomic { answer[i] == NO -> no_longer(i); is_over[NOW(i)] = 1 }; goto idle
#else
  :: atomic { answer[i] == NO ->
      if
      :: awaited[i] == SECOND_TRY -> abandon[NOW(i)] = 1
      :: else
      fi;
      no_longer(i) }; goto idle
#endif
  :: atomic { i == 0 && awaited[i] == FIRST_TRY ->
      ask_from(i); awaited[i] = SECOND_TRY; second[NOW(i)] = 1;
      printf("owner %d got no answer, and asks again\n", i) }; goto asking
  :: atomic { true ->
      no_longer(i); abandon[NOW(i)] = 1;
      printf("owner %d got no answer, and gives token %d up\n", i, NOW(i)) }; goto idle
  :: atomic { true -> die(i) }; goto idle
  fi;
holding:
  if
  :: atomic { awaited[i] == NOTHING && !renewal[NOW(i)] && renewed < RENEWALS && trusted[i] > 1 ->
      ask_from(i); awaited[i] = RENEWAL; renewal[NOW(i)] = 1;
      printf("owner %d renews\n", i) }; goto holding
  :: atomic { answer[i] == YES ->
      believe(i); renewed++;
      printf("owner %d is renewed, trusted for %d\n", i, trusted[i]) }; goto holding
  :: atomic { answer[i] == NO ->
      free(i); printf("owner %d has lost the lock, stops its body, and frees\n", i) }; goto idle
  :: atomic { awaited[i] == RENEWAL ->
      awaited[i] = NOTHING; answer[i] = NOTHING; trusted_by_answer[i] = 0; lag_by_answer[i] = 0;
      printf("owner %d gets no answer to its renewal\n", i) }; goto holding
  :: atomic { trusted[i] <= 1 ->
      free(i); printf("owner %d could not renew in time, stops its body, and frees\n", i) }; goto idle
  :: atomic { true -> free(i); printf("the body of owner %d ends, and it frees\n", i) }; goto idle
  :: atomic { true -> renewed = 0; die(i) }; goto idle
  fi
}

inline count_down(i) {
  if
  :: i == 0 && lag[i] < SLOW && lag_by_answer[i] < SLOW && (trusted[i] || trusted_by_answer[i]) ->
    if
    :: trusted[i] -> lag[i]++
    :: else
    fi;
    if
    :: trusted_by_answer[i] -> lag_by_answer[i]++
    :: else
    fi;
    printf("a tick, which the clock of owner %d misses\n", i)
  :: true ->
    if
    :: trusted[i] -> trusted[i]--
    :: else
    fi;
    if
    :: trusted_by_answer[i] -> trusted_by_answer[i]--
    :: else
    fi
  fi
}

#ifdef PAUSE
#define IN_TIME(i) true
#else
/* A body whose lease is not trusted any more has been killed by then. */
#define IN_TIME(i) (!body[i] || trusted[i] > 1)
#endif

proctype Time() {
  byte i;
  do
  :: atomic {
      IN_TIME(0) && IN_TIME(1)
#if OWNERS > 2
      && IN_TIME(2)
#endif
      ->
      for (i : 0 .. OWNERS - 1) { count_down(i) }
      if
      :: left && !has_no_ttl -> left--
      :: else
      fi;
      if
      :: left == 0 && key ->
        printf("a tick: the hold of token %d has ended\n", key);
        i = key; key = 0; tidy(i); i = 0
      :: else -> printf("a tick: held by %d, %d left\n", key, left)
      fi;
#ifdef OVER_TOO_SHORT
      over[1] = 0; over[2] = 0;
#endif
    }
  od
}

/* A lease is trusted no longer than the server keeps the owner's key; hence never two of them. */
#define KEPT(i) (!trusted[i] || key == NOW(i))

proctype Watch() {
end:
  atomic {
    !(KEPT(0) && KEPT(1)) || body[0] + body[1] > 1
#if OWNERS > 2
    || !KEPT(2) || body[0] + body[1] + body[2] > 1
#endif
    ->
    printf("VIOLATED: bodies %d %d, trusted for %d %d, held by token %d\n", body[0], body[1], trusted[0], trusted[1], key);
    assert(KEPT(0) && KEPT(1)
#if OWNERS > 2
      && KEPT(2) && body[2] == 0
#endif
    );
    assert(body[0] + body[1] <= 1)
  }
}

init {
  byte i;
  atomic {
    for (i : 0 .. OWNERS - 1) { run Wire(i); run Owner(i) }
    i = 0;
    run Time();
    run Watch()
  }
}

ltl free_again { []<> (key == 0) }
