"""Transactions for Apache Pulsar from Python."""
