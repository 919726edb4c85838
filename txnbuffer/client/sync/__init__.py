"""The sync client: the asyncio client for code without asyncio.

It may import everything of the client but `connection`, which opens it.
"""
