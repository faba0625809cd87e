"""Simulation of a cluster: replicas, API processes, clients and a store, as discrete events with faults.

The rules of ownership and what owners decide is the code of `holdfast.cluster`, as it serves. Time, chance,
the network and the faults are simulated; the same seed gives the same run.
"""
