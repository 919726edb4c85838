"""Tools that prove a broker: the contract suite, and a simulated world of disk, clock and randomness."""

from broker_io.testing.disk import Crash, Operation, SeededRandomness, SimulatedClock, SimulatedDisk, Unsynced

__all__ = ["Crash", "Operation", "SeededRandomness", "SimulatedClock", "SimulatedDisk", "Unsynced"]
