"""Faults of settings, tasks, servers, workers and keys, before and after something has happened.

A rule is a function that yields findings about one context, and decides how bad each is. The rules stand in `settings`,
`tasks`, `beat`, `servers`, `keys` and `workers`, each module with its tuple of them. `audit` (also for a worker that
starts), `doctor` and Django's checks put them to an app; none of them judges by itself.

Begin with `finding`. To add a finding, write a rule in the module of its subject and name it in the tuple there.
"""
