"""Redlock: locks on a majority of independent Redis servers, so that no single failure or failover can grant one twice.

Begin with `store.py`. `commands.py` has the commands for one node, `conversation.py` sends them to all nodes at once,
and `nodes.py`, `votes.py` and `majority.py` combine the answers. Protocol: `docs/protocol.md`, section 10.
"""
