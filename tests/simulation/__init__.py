"""A deterministic simulator: the package's own code, on hosts, processes, networks and servers that one seed decides.

Begin with `scheduler.py`; `fakes.py` is what the package imports in place of the standard library, `loading.py` loads
it so, `world.py` has the servers and the broker, `worker.py` Celery's part of a worker.
"""
