"""Names under which the service is asked over gRPC."""

SESSION_SERVICE = "txnbuffer.v1.Session"
TALK = "Talk"
ADMIN_SERVICE = "txnbuffer.v1.Admin"
ERROR_NAME = "txnbuffer-error"
ERROR_FAULT = "txnbuffer-fault"
"""Trailing metadata with the class and the fault of the error whose message is the status's details."""
