"""What a worker's main process does: it checks the settings, renews for its children, and frees for the dead.

Begin with `bootstep.py`, which a worker runs when it starts; each delivery is a `request.py`.
"""
