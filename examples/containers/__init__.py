"""Two beats and two workers, each in its own container: `docker compose up`, or `make compose-demo`."""

#: Seconds that a lock outlives its worker, and that a claim of a beat outlives it; short, so that you can watch it.
TTL = 3.0
