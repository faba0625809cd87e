"""The engine: carries out the plans of the core on a device.

Owns the executor that turns a plan into tensors and tokens, sampling, the step loop, the memory tiers and the
journal. Decides nothing about memory on its own: it runs what the core planned and reports what happened.
Imports the core, the models and the kernels; called by the server and the command.
"""
