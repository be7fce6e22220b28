"""Options of a task and a call, settings of an app and of beat: their names, what they may be, where each comes from.

Begin with `rules`, the tables of them all. `task`, `app` and `beat` look them up and give them as one checked value;
`delivery` is about the broker's settings, as far as locks depend on them; `words` has the names that others use.
"""
