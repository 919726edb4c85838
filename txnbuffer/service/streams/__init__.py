"""Change streams of topics, with their feeds and durable cursors.

It may import what `topics` may, and `topics`.
"""
