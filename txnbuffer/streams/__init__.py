"""Change streams: committed mutations in order, resumable, with rollback when the history branched.

Client and server are state machines without clock or network: they take messages and times, and return messages,
effects and events.
"""
