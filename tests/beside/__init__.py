"""Beside other people's code: the real packages, on real workers, in environments of their own.

These tests use only tasks, Redis and the commands, so that they hold whatever the package looks like inside.
"""
