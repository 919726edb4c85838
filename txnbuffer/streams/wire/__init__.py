"""Frames of change streams as bytes: what client and server tell each other over one connection.

A frame is

    offset  size
         0     4  length n of the control record, little-endian
         4     n  the control record: Avro, without a schema in front
     4 + n        blocks (`broker_io.block`, not compressed) of mutations, one behind the other

The control record begins with `kinds`, one byte for each message of the frame, in their order. What the
messages of a kind say stands in columns of that kind, one value a message: so a frame costs by the kind and
not by the message. Frames of clients, which have no blocks, are described in `txnbuffer.streams.wire.client`,
those of servers in `txnbuffer.streams.wire.server`, errors in `txnbuffer.wire.faults`. Streams are numbered from 1,
seqnos go from 0 to 2^63 - 1. What does not follow all of this is refused whole, with MalformedFrame.
"""

from txnbuffer.streams.wire.client import decode_client_frame, encode_client_frame
from txnbuffer.streams.wire.server import decode_server_frame, encode_server_frame

__all__ = ["decode_client_frame", "decode_server_frame", "encode_client_frame", "encode_server_frame"]
