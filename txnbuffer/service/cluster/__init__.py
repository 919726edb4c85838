"""Cluster mode: topics to which applications write themselves, and topics of other shards.

It may import what `topics` may, and `topics`.
"""
