"""What the locks cost, compared with other locks: every figure is a ratio within one run. `make bench`."""
