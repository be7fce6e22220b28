"""Whatever others can send, set, write or answer, by the hundred thousand: see `make fuzz`."""
