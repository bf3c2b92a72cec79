"""What a compiled learner computes with on a GPU: the losses' gradients written out, and the kernels under them.

`losses`, `networks` and `optim` say what is computed; nothing here says more, and all of it is tested against them.
Only modules whose names end in `_kernels` need Triton. The module beside them has their contract and the same in plain
operations, for CPUs and tests, and imports them where `kernels.buildable` says so. The README maps the others.
"""
