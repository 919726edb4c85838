"""Exactly-once processing by consumer groups: members, handlers and the loop that calls them.

It may import `reading`, `path`, `base`, `transaction` and `topic_names`.
"""
