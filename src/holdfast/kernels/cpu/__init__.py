"""Kernels of our own for CPUs, in C: quantised products, attention over pages, a whole decoder pass.

They serve where the machine has a C compiler and vector instructions; `holdfast.kernels.torch` is what runs
otherwise, and what they are tested against. Used by `models` and by the torch kernels.
"""
