"""Hundreds of thousands of inputs that others could send, set, write or answer: see `make fuzz`."""
