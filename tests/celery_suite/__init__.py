"""Celery's own tests, run with the stock task and with ours: `make celery-suite`.

They are not collected with the project's tests: `__main__` runs them in their own environment.
"""
