"""The edges of a run: command line, run log, snapshots, progress, pictures."""
