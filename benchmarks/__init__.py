"""The cost of the locks, compared with other locks: every figure is a ratio within one run. `make bench`."""
