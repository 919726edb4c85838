"""Frames as bytes: what client and service send each other over a session's connection.

A frame is

    offset  size
         0     4  length n of the control record, little-endian
         4     n  the control record: Avro, without a schema in front
     4 + n        blocks (`broker_io.block`, not compressed), one a send, one behind the other

The control record holds columns, one Avro array for each field of the rows of one kind, so that a
frame costs by the kind and not by the row. Client frames are described in `txnbuffer.wire.client`,
server frames, which have no blocks, in `txnbuffer.wire.server`, errors in `txnbuffer.wire.faults`.
What does not follow all of this is refused whole, with MalformedFrame.
"""

from txnbuffer.errors import MalformedFrame
from txnbuffer.wire.client import decode_client_frame, encode_client_frame
from txnbuffer.wire.server import decode_server_frame, encode_server_frame

__all__ = [
    "MalformedFrame",
    "decode_client_frame",
    "decode_server_frame",
    "encode_client_frame",
    "encode_server_frame",
]
