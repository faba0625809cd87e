"""Models: configuration, weights, and layers over the kernels. Imports nothing of the engine."""
