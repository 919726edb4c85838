"""Before this process owns the log: it waits, keeps topics warm, takes the log over and hands it over.

It may import `loop` and `log_readers` of the service.
"""
