"""The engine: the owner of all logs, made of the other rooms, and what needs several of them.

It may import every room but `servers`.
"""
