"""A user's own task under faults: on separate workers and queues, with separate keys, judged by what really ran.

Begin with `faults.py`: what each fault does, and what must hold then. A `Scene` is the set-up for one fault. Its
workers write what happens to a history, and hear nothing from the lock server when it is to be silent (`witness.py`).
"""
