"""Ownership of sessions in a cluster: rules of the store, state of an owner, placement and draining.

Pure code on the standard library: no clock, no randomness, no I/O. The journal in PostgreSQL and the
simulation of a cluster (`holdfast.sim.cluster`) both run it.
"""
