"""Errors of the command line alone; the tree's root is `broker_io.errors`."""

from broker_io.errors import EnvironmentFault


class OutputFailed(EnvironmentFault):
    """What a command prints could not be written."""
