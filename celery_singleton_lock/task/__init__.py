"""One message in the hands of one process: the lock, the body, and what becomes of copies and conflicts.

Begin with `singleton_task.py`, whose `__call__` is where a worker comes in, and go on with `carry_out.py`: before the
lock is had (`acquisition`), under it (`run`), and where no body runs (`refusal`, `redelivery`).
"""
