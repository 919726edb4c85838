"""Whether a decision log lacks what it once held: topics then tell of ends, or of epochs, that it does not.

A decision, and the epoch of who takes it, are durable in the log before any marker tells of them. Where markers tell
of more, entries of the log are gone, and an owner would lease ids a second time: what commits under them is seen by
nobody.
Records are no such sign, for whoever writes to a topic can name any id in them; unless the log knows of nothing at all,
where its topics were registered before the first of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyroaring import BitMap64

from broker_io.batch import Message
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.ended import CoordinatorState
from txnbuffer.coordinator.entries import Mark, Owner, encode
from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.journal import ids_of

Buffers = Mapping[str, TransactionBuffer]
"""Topics, each with what its log tells up to its end."""

AHEAD = 2**32
"""More ids than are under way: leased and not used yet, or used and not ended."""
A_SECOND = 2**20
"""More ids than any log uses in a second."""


def no_owner(history: History) -> str | None:
    """What shows that a log was not begun by an owner, whose own entry is the first; None if it was.

    Where a log is deleted and made anew, what an owner of the older one had under way may come to stand in the newer
    one: its ids say nothing of how far those of the older one went. To be asked before another owner writes its entry.
    """
    if history.owned or is_blank(history):
        return None
    return "it has entries and no owner's, as where one of an older log of that name wrote them, which was deleted"


def what_is_lost(history: History, epoch: int, shard: int, topics: Buffers) -> str | None:
    """What shows that the log lacks something; None if nothing does. `epoch` is that of the next owner."""
    known = _ids(history)
    blank = is_blank(history)
    for topic, buffer in topics.items():
        if blank and any(opened.txn.most == shard for opened in buffer.ongoing):
            return f"topic {topic} has transactions of this coordinator, and the log has nothing"
        state = buffer.coordinators.get(shard)
        if state is None:
            continue
        if state.epoch >= epoch:
            return f"topic {topic} has markers of epoch {state.epoch}, and the log's next one is {epoch}"
        mark = history.low_water_mark
        if state.low_water_mark > mark:
            return f"topic {topic} has low-water mark {shard}:{state.low_water_mark}, and the log {shard}:{mark}"
        ended = state.committed | state.aborted
        ended.remove_range(0, mark + 1)
        if unknown := ended - known:
            return f"transaction {shard}:{unknown.min()} ended on topic {topic}, and the log knows no such id"
    return None


def begun_anew(history: History, shard: int, topics: Buffers, owner: str) -> list[Message]:
    """Entries that let a log go on above all that it and the topics know.

    What is undecided on a topic under an id up to there has then ended without a decision, and aborts.
    """
    epoch, highest = history.epoch, history.highest_id
    for buffer in topics.values():
        state = buffer.coordinators.get(shard, CoordinatorState())
        ended = state.committed | state.aborted
        epoch, highest = max(epoch, state.epoch), max(highest, state.low_water_mark, ended.max() if ended else 0)
    mark = Mark(history.next_mark, highest + AHEAD, 0, BitMap64(), BitMap64())
    return [encode(Owner(epoch + 1, owner, "", tuple(sorted(history.owners.values())))), encode(mark)]


def first_ids(history: History, now_ms: int) -> Message | None:
    """The entry by which the ids of a log that is begun now lie above those of any that had its name before.

    None for one that was begun before. What is still under way to topics of the older log, in a namespace that was
    deleted, may reach those of the newer one: under ids that were used again it would pass for part of a transaction.
    """
    if not is_blank(history):
        return None
    return encode(Mark(history.next_mark, now_ms // 1000 * A_SECOND, 0, BitMap64(), BitMap64()))


def is_blank(history: History) -> bool:
    """Whether the log tells of nothing but owners."""
    return not (history.leases or history.groups or history.marks or history.topics)


def _ids(history: History) -> BitMap64:
    """All ids above the low-water mark that the log has heard of."""
    ids = history.ended.copy()
    for lease in history.leases.values():
        ids.add_range(lease.first, lease.first + lease.size)
    for group in history.groups.values():
        ids |= ids_of(group)
    return ids
