"""Models as pure functions: init(key, ...) -> parameters, apply(parameters, ...) -> outputs."""
