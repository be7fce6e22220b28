"""Locks on Redis: one server, one behind Sentinels, a cluster, or the nodes of a Redlock.

Begin with `store.py`, then `redlock.py`; what runs on the server is in `scripts/`.
"""
