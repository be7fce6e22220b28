"""Locks on Redis: one server, one behind Sentinels, a cluster (`store.py`), or the nodes of a Redlock (`redlock.py`).

What runs on a server is in `scripts/`, and what it is asked in `…_commands.py`. How it gets there: `connection.py`,
`server.py`, `cluster.py`; for a Redlock `node.py`, `conversation.py` and `nodes.py`.
"""
