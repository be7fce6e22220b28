"""A user's own task under faults: on workers and queues of its own, with keys of its own, judged by what really ran.

Begin with `faults.py`: what is done, and what must hold then. A `Scene` is the place of one fault. The workers write
what happens to a history (`witness.py`, `history.py`); a proxy cuts the lock server off.
"""
