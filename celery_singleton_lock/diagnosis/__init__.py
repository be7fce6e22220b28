"""Finds faults of settings, tasks, servers, workers and keys, before and after they have done harm.

A rule is a function that yields findings about one context, and decides how bad each is. The rules are in `settings`,
`tasks`, `beat`, `servers`, `keys` and `workers`; each module has a tuple of them. `audit` (also when a worker starts),
`doctor` and Django's checks apply them to an app, and judge nothing themselves.

Begin with `finding`. To add a finding, write a rule in the module of its subject and add it to the tuple there.
"""
