"""What a member still keeps of its journal and of replaced files

The journal is a chain of files. A checkpoint writes a manifest; records up to it are dropped from the journal once
all that may still ask for them have them: the stores in sync, which have everything committed, and a backup that
is copied to or catches up. Files that a copy lists are removed after it only. Both are bounded: beyond `keep_bytes` the
link to the backup is broken, and its copy begins again.

A compaction is two operations. The primary has written the new files before `prepare`, which says their lengths and
digests; a backup that applies it fetches them. The `swap` is appended when all that are required have them. A backup
that was not required then fetches them before it applies the swap.
"""

from __future__ import annotations

from broker_io.filelog.log.records import Store
from broker_io.filelog.replication import following, serving
from broker_io.filelog.replication.member import PairMember, PeerStage
from broker_io.filelog.replication.messages import (
    AppendSwap,
    Checkpointed,
    DropJournal,
    RemoveFiles,
    ReplacedFiles,
    RewriteDone,
    RewriteFinished,
)


def on_checkpointed(member: PairMember, event: Checkpointed) -> None:
    """A manifest and all synced segments hold everything up to a mark."""
    member.log.manifest = event.mark
    _drop(member)


def _drop(member: PairMember) -> None:
    index = member.log.index
    if (lsn := kept_after(member)) > index.base.lsn:
        index.drop(lsn)
        member.do(DropJournal(lsn))


def kept_after(member: PairMember) -> int:
    """The lsn after which the journal is kept."""
    log, peer = member.log, member.peer
    lsn = min(log.manifest.lsn, log.index.end.lsn)
    if peer is not None:
        lsn = min(lsn, peer.sent if peer.durable is None else peer.durable)
    return max(lsn, log.index.base.lsn)


def on_replaced_files(member: PairMember, event: ReplacedFiles) -> None:
    """Files that no manifest names any more."""
    member.replaced = (*member.replaced, *event.files)


def is_copying(member: PairMember) -> bool:
    """Whether a backup may still read files as of an earlier manifest: until it has said that the copy is durable."""
    peer = member.peer
    return peer is not None and (peer.stage is PeerStage.COPYING or peer.copied)


def review(member: PairMember) -> None:
    """After every event: remove what nobody needs; give a backup up that holds too much."""
    log, peer = member.log, member.peer
    limit = member.settings.keep_bytes
    if peer is not None and member.serves:
        held = log.index.bytes_between(kept_after(member), max(log.manifest.lsn, log.index.base.lsn))
        if held > limit or (is_copying(member) and sum([size for _, size in member.replaced]) > limit):
            member.break_link()
            _drop(member)
    if member.replaced and not is_copying(member):
        member.do(RemoveFiles(tuple([name for name, _ in member.replaced])))
        member.replaced = ()


def on_rewrite_finished(member: PairMember, event: RewriteFinished) -> None:
    """This store's result of a compaction; the primary learns what a backup has."""
    _note_rewrite(member, member.store, event)
    following.report_rewrites(member)


def on_rewrite_done(member: PairMember, message: RewriteDone) -> None:
    peer = member.peer
    if peer is None or (message.epoch, message.store) != (member.leading.epoch, peer.store):
        return
    for event in message.results:
        _note_rewrite(member, message.store, event)


def _note_rewrite(member: PairMember, store: Store, event: RewriteFinished) -> None:
    kept = [each for each in member.rewrites if (each[0], each[1].number) != (store, event.number)]
    member.rewrites = (*kept, (store, event))


def append_swaps(member: PairMember) -> None:
    """Append the swap of each compaction that all required stores have rewritten, with the primary's result."""
    needed = serving.required(member)
    for event in [result for store, result in member.rewrites if store == member.store]:
        if needed <= {store for store, result in member.rewrites if result.number == event.number}:
            member.rewrites = tuple(each for each in member.rewrites if each[1].number != event.number)
            member.do(AppendSwap(event))
