"""Tests and simulators for brokers: the contract suite, and simulated disk, clock and randomness.

The suite needs the extra `testing`.
"""

from broker_io.testing.disk import Crash, Operation, SeededRandomness, SimulatedClock, SimulatedDisk, Unsynced

__all__ = ["Crash", "Operation", "SeededRandomness", "SimulatedClock", "SimulatedDisk", "Unsynced"]
