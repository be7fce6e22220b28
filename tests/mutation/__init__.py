"""Do the tests see what the code does? Small changes to the protocol's files, drawn at random from all that there are.

`tests/simulation/mutants` are faults that somebody thought of; these are those that nobody did.
"""
