"""Locks on Redis: one server, one behind Sentinels, a cluster (`store.py`), or the nodes of a Redlock (`redlock/`).

What runs on a server is in `scripts/`; what of a lock it is asked, in `lock_commands.py`. How it gets there:
`connection.py`, `server.py`, `cluster.py`.
"""
