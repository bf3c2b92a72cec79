"""Ranks: the process groups and what travels between them."""
