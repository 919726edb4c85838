"""A frame of each kind that two members of a pair exchange."""

from __future__ import annotations

from broker_io.filelog.log.records import Fork, Kind, LogRecord, Mark
from broker_io.filelog.pair.link_frames import CopyEnd, Frame
from broker_io.filelog.pair.port import CopyChunk
from broker_io.filelog.replication import messages as m

STORE, END = b"\x0a" * 16, Mark(3, 2**40, 2**64 - 1)
SAMPLES: dict[str, Frame] = {
    "sign-of-life": None,
    "hello": m.Hello(3, STORE, END, Mark(2, 5, 9), True),
    "follow": m.Follow(4, STORE, END, 7),
    "rejoin": m.Rejoin(4, STORE, m.CatchUp.REPLACE, END),
    "copy-request": m.CopyRequest(4, STORE),
    "copy-begin": m.CopyBegin(4, STORE, END, (Fork(2, Mark(1, 3, 8)), Fork(4, END))),
    "records": m.Records(4, STORE, (LogRecord(END, 6, Kind.EPOCH, b"one"), LogRecord(END, 7, Kind.DATA, b"")), 8),
    "commit": m.Records(4, STORE, (), 8),
    "durable": m.Durable(4, STORE, END, 6, True),
    "rewrite-done": m.RewriteDone(4, STORE, (m.RewriteFinished(1, 2, b"d1"), m.RewriteFinished(3, 4, b"d2"))),
    "damaged-topics": m.DamagedTopics(4, STORE, ("orders", "überweisungen")),
    "copy-chunk": CopyChunk("topics/7-1", 2**33, b"bytes", 2**32 - 1),
    "copy-end": CopyEnd(),
}
