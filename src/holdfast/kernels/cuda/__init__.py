"""CUDA C++ kernels for Hopper, for what Triton cannot express: L2 cache hints, cluster reductions, TMA.

Compiled with NVRTC on first use and cached on disk. Called by the Triton package, which is the fallback; the
engine asks through `holdfast.kernels` whether there is one for its attention.
"""
