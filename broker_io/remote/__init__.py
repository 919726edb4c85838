"""The log of a running service: a broker over gRPC, and the service side over any broker.

Service `txnbuffer.v1.Log`. `broker_io.remote.messages` has the methods and the bytes of their messages.
"""

from broker_io.environment import set_up_grpc

set_up_grpc()
