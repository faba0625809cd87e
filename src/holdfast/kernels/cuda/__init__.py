"""Kernels in CUDA C++ for what Triton cannot say: hints to the second cache, clusters that add up together.

Compiled when first needed and kept in the user's cache. Called by the Triton package, which serves wherever
these do not; the engine asks through `holdfast.kernels` whether there is one for its attention.
"""
