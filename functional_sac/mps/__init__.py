"""CUDA process sharing (NVIDIA MPS): several processes of one user run kernels on one GPU side by side."""
