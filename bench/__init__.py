"""Figures of this machine, measured side by side with peers where there are any: `make bench`."""
