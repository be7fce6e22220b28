"""What is wrong with settings, tasks, servers, workers and keys, before and after something has happened."""
