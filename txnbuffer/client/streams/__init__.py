"""Change streams as applications use them, with resume tokens and durable cursors.

It may import `session`, `admin_clients`, `lifecycle` and `topic_names`.
"""
