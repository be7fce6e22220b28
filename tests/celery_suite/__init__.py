"""Celery's own tests, run with the stock task and with ours: `make celery-suite`.

Not collected with the project's tests: `__main__` runs them in an environment of their own.
"""
