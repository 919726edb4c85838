"""The gRPC and HTTP servers, and the requests of operators that both answer.

It may import every other room; only `process` and `offline` import it.
"""
