"""Locks on Redis: one server, one behind Sentinels, a cluster (`store.py`), or the nodes of a Redlock (`redlock.py`).

`scripts/` has what runs on a server, and `lock_commands.py` the commands for one lock. `connection.py`, `server.py` and
`cluster.py` send them.
"""
