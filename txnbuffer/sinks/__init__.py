"""Sinks of change streams: the loop that writes a topic to a sink exactly once, a SQLite sink, and the relay"""
