"""Tensor operations: a torch reference and a Triton implementation behind each function.

Owns the arithmetic on pages, windows and states, and promises that both implementations of a function agree.
Knows tensors alone: neither sessions nor models. Called by the models and the engine.
"""
