"""The supervised trainer: settings, the pure update, recovery, and the host's loop around them."""
