"""One message in one process: the lock, the body, and what happens to copies and conflicts.

Begin with `singleton_task.py`: a worker calls its `__call__`. Go on with `run.py`: getting the lock
(`acquisition`), under it, and without a body (`decide`, `conclude`).
"""
