"""Do the tests notice changes of the code? Small random changes to the protocol's files.

`tests/simulation/mutants` has faults that somebody thought of; these are faults that nobody thought of.
"""
