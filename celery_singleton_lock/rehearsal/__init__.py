"""A user's own task under faults: on separate workers and queues, with separate keys, judged by what really ran.

Begin with `faults.py`: what each fault does, and what must hold then. A `Scene` is the set-up for one fault. Its
workers write what happens to a history (`witness.py`); a proxy silences the lock server for them.
"""
