"""Brokers of topics behind one port: in memory, in files, and (later) of a running service and of Pulsar."""
