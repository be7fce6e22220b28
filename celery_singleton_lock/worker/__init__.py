"""The main process of a worker: it checks the settings, renews for its children, and frees the locks of dead ones.

Begin with `bootstep.py`, which a worker runs when it starts; each delivery is a `request.py`.
"""
