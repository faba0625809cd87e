"""The simulation: a seeded world that drives the core without a model and without a device.

Owns the simulated device memory, the faults, the workloads and the mutants. The same seed and the same commit
give the same run, so every finding can be replayed. Imports only the core; never torch.
"""
