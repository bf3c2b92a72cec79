"""A run repeated from its start or any snapshot, and the first leaf and update in which it differs."""
