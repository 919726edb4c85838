"""The plugin process: one engine that owns the logs, the coordinator and the buffers, and the shells around it."""
