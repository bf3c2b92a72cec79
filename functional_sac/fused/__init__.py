"""What a compiled learner computes with on a GPU: the losses' gradients written out, and the kernels under them.

`losses`, `networks` and `optim` say what is computed; nothing here says more, and every room is proved against them.
"""
