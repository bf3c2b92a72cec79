"""Supervised tasks that come with the package; each module's `build` is a recipe for `functional_sl.train`."""
