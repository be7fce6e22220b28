"""Finds faults of settings, tasks, servers, workers and keys, before and after they have done harm.

A rule says whether it applies, how bad that is, and what to do. The rules are in `audit` (of an app), `tasks`,
`servers` and `peers`, in functions that have the findings about one subject. The doctor, Django's
checks and a worker that starts apply them to an app, and judge nothing themselves.

Begin with `finding`. To add a finding, add a rule in the module of its subject.
"""
