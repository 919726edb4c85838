"""Change streams: what committed, in order, resumable, with a truthful rollback when history branched.

Both sides are state machines without a clock or a network: they take messages and times, and return
messages, effects and events.
"""
