"""A deterministic simulator: the package's own code on hosts, processes, networks and servers decided by one seed.

Start with `scheduler.py`. `fakes.py` replaces the standard library for the package, `loading.py` loads the package that
way, `world.py` has the servers and the broker, and `worker.py` has Celery's part of a worker.
"""
