"""A user's own task under faults: on separate workers and queues, with separate keys, judged by what really ran.

Begin with `faults.py`: what is done, and what must hold then. A `Scene` is the place of one fault. The workers write
what happens to a history (`witness.py`, `history.py`); a proxy cuts the lock server off.
"""
