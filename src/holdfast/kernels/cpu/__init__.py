"""C kernels for CPUs: quantised products, attention over pages, a whole decoder pass.

They need a C compiler and vector instructions; otherwise, and as the reference in tests,
`holdfast.kernels.torch` runs. Used by `models` and by the torch kernels.
"""
