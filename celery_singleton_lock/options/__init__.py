"""Options of tasks and calls, settings of the app and of beat: their names, their values, and where each comes from.

Begin with `rules`, which has the tables. `task` and `app` look options up and return them as one checked value.
`words` finds names that would do nothing.
"""
