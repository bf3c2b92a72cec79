"""Reference motions: generated or read from files, checked, and laid out as tensors for a tracking task."""
