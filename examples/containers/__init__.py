"""Two beats and two workers in containers of their own: `docker compose up`, or `make compose-demo`."""

#: Seconds that a lock outlives its worker, and that a beat leads on without renewal; short, so that it can be watched.
TTL = 3.0
