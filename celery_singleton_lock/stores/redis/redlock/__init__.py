"""Redlock: locks on a majority of independent Redis servers, so that no single failure or failover can give one twice.

Begin with `store.py`. `commands.py` has what a node is asked; how all are asked at once, `conversation.py`; what they
say together, `nodes.py`, `votes.py` and `majority.py`. Protocol: `docs/protocol.md`, section 10.
"""
