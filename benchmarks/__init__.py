"""What the locks cost, beside what else there is: every figure is a ratio within one run. `make bench`."""
