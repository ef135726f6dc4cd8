"""Triton kernels of ReplaySSM decoding for CUDA GPUs of compute capability 8.0 and newer."""
