"""The service process: an engine that owns the log, the coordinator and the buffers, and its gRPC and HTTP servers."""
