package txnbuffer.broker;

import io.netty.buffer.ByteBuf;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;
import org.apache.bookkeeper.mledger.AsyncCallbacks.DeleteCursorCallback;
import org.apache.bookkeeper.mledger.Entry;
import org.apache.bookkeeper.mledger.ManagedCursor;
import org.apache.bookkeeper.mledger.ManagedLedger;
import org.apache.bookkeeper.mledger.ManagedLedgerException;
import org.apache.bookkeeper.mledger.Position;
import org.apache.bookkeeper.mledger.PositionFactory;
import org.apache.bookkeeper.mledger.impl.ManagedLedgerImpl;
import org.apache.bookkeeper.mledger.util.ManagedLedgerUtils;
import org.apache.pulsar.common.naming.TopicName;
import org.apache.pulsar.common.util.FutureUtil;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;
import txnbuffer.broker.Rules.Place;
import txnbuffer.broker.Snapshot.Found;

/**
 * Passes each entry of a topic's log once to the rules, in log order: as it is stored, or read again if it was stored
 * before that or was missed.
 *
 * <p>The snapshot says where to begin. Until the log is read from there to its end, nothing after its start is
 * delivered. What fails is tried again and again, so a topic goes on once an operator has repaired its snapshot.
 *
 * <p>A topic without a snapshot has had no transactions so far. Before the first one, txnbuffer makes its durable
 * subscription at the topic; as long as there is none, entries are not looked at.
 */
final class TopicLog {
    private static final Logger log = LoggerFactory.getLogger(TopicLog.class);
    private static final String INCARNATION = "txnbuffer.incarnation";
    private static final String PLAIN = "txnbuffer.plain", EVERYTHING = "everything";
    static final String SUBSCRIPTION = "__txnbuffer";
    static final String STATE = "txnbuffer."; // begins the names of what state() shows
    private static final int ENTRIES = 500;
    private static final long BYTES = 4 * 1024 * 1024;
    private static final long FIRST_WAIT = 1, LONGEST_WAIT = 60; // seconds before another attempt

    private final String name;
    private final TxnTopic topic;
    private final ManagedLedger ledger;
    private final ScheduledExecutorService executor;
    private final SnapshotTopic snapshots;
    private volatile Rules rules; // null: the topic has no transactions
    private volatile Position bound = PositionFactory.EARLIEST;
    private volatile Position unreadable; // the entry that the filter cannot read
    private volatile CompletableFuture<Void> loaded = CompletableFuture.completedFuture(null);
    private Position applied; // the last entry that was passed to the rules
    private boolean live; // stored entries are passed at once
    private boolean asking;
    private boolean closed;
    private boolean everything; // an operator lets plain consumers have all that is in the log
    private String said; // why the topic is stopped, as it was logged
    private String failed; // what could not be read, null if nothing
    private long firstLedger; // those below are forgotten
    private long oldestLedger; // that existed when reading the log began
    private long wait = FIRST_WAIT;

    TopicLog(TxnTopic topic, ManagedLedger ledger) {
        this.name = topic.getName();
        this.topic = topic;
        this.ledger = ledger;
        this.executor = topic.getBrokerService().pulsar().getExecutor();
        this.snapshots = new SnapshotTopic(topic.getBrokerService(), TopicName.get(name), executor);
    }

    /** Whether somebody may write records of transactions: set before the first one, and then for ever. */
    boolean isMarked() {
        return topic.getSubscriptions().containsKey(SUBSCRIPTION) || ledger.getProperties().containsKey(INCARNATION);
    }

    private CompletableFuture<Found> snapshot() {
        return snapshots.read(ledger.getProperties().get(INCARNATION), ledger.getName());
    }

    // Output, for any thread

    /** The last entry that dispatchers may read. */
    Position bound() {
        Position held = unreadable;
        return held != null && held.compareTo(bound) <= 0 ? ledger.getPreviousPosition(held) : bound;
    }

    /** The rules; null if the topic has no transactions. */
    Rules rules() {
        return rules;
    }

    /** Also while that is not known. */
    boolean mayHaveTransactions() {
        return rules != null || !loaded.isDone();
    }

    /** Also while that is not known. Topics of this library may have had none, such as the copies of relays. */
    synchronized boolean hadTransactions() {
        return !loaded.isDone() || (rules == null ? everything && isMarked() : !rules.isUnregistered());
    }

    /** Completes when the log was read to its end. */
    CompletableFuture<Void> loaded() {
        return loaded;
    }

    /**
     * What operators see among the stats of the topic, as properties of the subscription: {@code txnbuffer.state},
     * {@code txnbuffer.readable}, the last entry that plain consumers may read, and
     * <ul>
     * <li>{@code ready}: nothing is held back;
     * <li>{@code open}: {@code txnbuffer.transaction}, whose first record is at {@code txnbuffer.first}, is the oldest
     *     that is open, and what follows that waits;
     * <li>{@code loading}: the snapshot or the log is being read;
     * <li>{@code stopped}: nothing more is delivered, for {@code txnbuffer.reason};
     * <li>{@code everything}: the topic has the property {@code txnbuffer.plain=everything}, and is served as it is.
     * </ul>
     */
    synchronized Map<String, String> state() {
        Map<String, String> found = new LinkedHashMap<>();
        Position readable = bound();
        Rules.Open oldest = rules == null ? null : rules.oldest();
        String reason = rules != null && rules.stopped() != null ? rules.stopped() : failed;
        found.put("txnbuffer.state", everything ? EVERYTHING : reason != null ? "stopped"
                : !live || rules != null && rules.questioned() ? "loading" : oldest != null ? "open" : "ready");
        found.put("txnbuffer.readable", readable.getLedgerId() + ":" + readable.getEntryId());
        if (reason != null) {
            found.put("txnbuffer.reason", reason);
        }
        if (oldest != null) {
            found.put("txnbuffer.transaction", oldest.txn.most() + ":" + oldest.txn.least());
            found.put("txnbuffer.first", oldest.first.toString());
        }
        return found;
    }

    /** Deliver nothing from an entry on: its visible messages cannot be found out. */
    synchronized void hold(Position entry, Exception why) {
        if (unreadable == null || entry.compareTo(unreadable) < 0) {
            unreadable = entry;
            failed = text("entry " + entry + " cannot be read", why);
            log.error("[{}] txnbuffer: nothing from {} on is delivered to plain consumers", name, entry, why);
        }
    }

    private static String text(String what, Throwable why) {
        Throwable cause = FutureUtil.unwrapCompletionException(why);
        return what + ": " + (cause.getMessage() == null ? cause : cause.getMessage());
    }

    // Input

    synchronized void close() {
        closed = true;
        loaded.completeExceptionally(new IllegalStateException("topic " + name + " was closed"));
    }

    /** An entry was stored; called before readers are woken. */
    synchronized void stored(Position at, ByteBuf data) {
        if (!live || at.compareTo(applied) <= 0) {
            return; // it was read already, or will be
        }
        try {
            if (rules != null) {
                pass(at, data);
            } else if (!everything && isMarked()) {
                load();
            } else {
                applied = at;
                bound = at;
            }
        } catch (RuntimeException error) { // the entry is stored, whatever happens here
            live = false;
            again("its log cannot be read", error, rules == null ? this::load : this::read);
        }
    }

    private void pass(Position at, ByteBuf data) {
        boolean follows = at.getLedgerId() == applied.getLedgerId() ? at.getEntryId() == applied.getEntryId() + 1
                : ledger.getPreviousPosition(at).equals(applied);
        if (follows) {
            apply(at, data);
            publish();
        } else {
            oldestLedger = oldestLedger();
            read();
        }
    }

    private void apply(Position at, ByteBuf data) {
        try {
            Packed.visit(at, data, rules);
        } catch (Exception error) {
            rules.stop(Packed.place(at, -1), "an entry that cannot be read (" + error + ")");
        }
        rules.entry(at.getLedgerId(), at.getEntryId());
        applied = at;
    }

    private void publish() {
        Place last = rules.bound();
        if (last.ledger() != bound.getLedgerId() || last.entry() != bound.getEntryId()) {
            bound = PositionFactory.create(last.ledger(), last.entry());
        }
        String stopped = rules.stopped();
        if (stopped != null && !stopped.equals(said)) {
            said = stopped;
            log.error("[{}] txnbuffer: nothing after {} is delivered to plain consumers: {}", name, bound, stopped);
        }
        if (live && rules.questioned() && !asking) {
            ask();
        }
    }

    /** Forget what only deleted ledgers needed. */
    synchronized void trim() {
        long first = oldestLedger();
        if (rules != null && live && first > firstLedger) {
            firstLedger = first;
            rules.trim(first);
        }
    }

    // The snapshot

    synchronized void load() {
        live = false;
        loaded = new CompletableFuture<>();
        everything = EVERYTHING.equals(ledger.getProperties().get(PLAIN));
        topic.refuseReplication();
        if (everything) {
            log.warn("[{}] txnbuffer: plain consumers get everything: {}={}", name, PLAIN, EVERYTHING);
            ordinary(ledger.getLastConfirmedEntry());
            return;
        }
        Position end = ledger.getLastConfirmedEntry(); // before the end of the snapshot topic is taken
        snapshot().thenAcceptAsync(found -> begin(found, end), executor).exceptionally(error -> {
            again("its snapshot cannot be used", error, this::load);
            return null;
        });
    }

    private synchronized void begin(Found found, Position end) {
        oldestLedger = oldestLedger();
        try {
            switch (found.kind()) {
                case NONE:
                    Position stored = ledger.getLastConfirmedEntry();
                    if (!isMarked()) {
                        ordinary(stored);
                        return;
                    }
                    rules = new Rules();
                    rules.unregistered(Packed.place(end, -1));
                    applied = end;
                    break;
                case DELETED:
                    fromStart(PositionFactory.EARLIEST);
                    break;
                default:
                    Snapshot.Resume resume = Snapshot.resume(found, ledger.getLedgersInfo().navigableKeySet(), false);
                    Place after = resume.after();
                    if (resume.anew()) {
                        fromStart(PositionFactory.create(after.ledger(), after.entry()));
                    } else {
                        rules = found.rules();
                        applied = PositionFactory.create(after.ledger(), after.entry() - (after.batch() < 0 ? 0 : 1));
                    }
            }
        } catch (Snapshot.Refused error) {
            throw new CompletionException(error);
        }
        if (end.getEntryId() >= 0 && applied.compareTo(end) < 0) {
            rules.replayUntil(Packed.place(end, -1));
        }
        log.info("[{}] txnbuffer: {}, reads the log after {} to {}", name, found.kind(), applied, end);
        read();
    }

    /** All up to an entry is ordinary. */
    private void ordinary(Position stored) {
        rules = null;
        applied = stored;
        bound = stored;
        live = true;
        succeeded();
        loaded.complete(null);
    }

    private void fromStart(Position before) {
        rules = new Rules();
        rules.fromStart();
        applied = before;
    }

    /** Records of a transaction in a topic without a snapshot: is there one now? If not, it was lost. */
    private void ask() {
        asking = rules != null && rules.questioned(); // not if the log was loaded anew since the last attempt
        if (!asking) {
            return;
        }
        snapshot().thenAcceptAsync(found -> {
            if (found.kind() == Snapshot.Kind.NONE) {
                throw new IllegalStateException("it has no snapshot, but records or markers of transactions");
            }
            synchronized (this) {
                asking = false;
                load();
            }
        }, executor).exceptionally(error -> {
            again("its snapshot cannot be used", error, this::ask);
            return null;
        });
    }

    private boolean isGone() {
        return closed || ledger instanceof ManagedLedgerImpl impl
                && (impl.getState() == ManagedLedgerImpl.State.Closed || impl.getState().isFenced());
    }

    private void succeeded() {
        wait = FIRST_WAIT;
        if (unreadable == null) {
            failed = null;
        }
    }

    private synchronized void again(String what, Throwable error, Runnable attempt) {
        if (isGone()) {
            return;
        }
        failed = text(what, error);
        log.error("[{}] txnbuffer: nothing after {} is delivered to plain consumers: {}; next attempt in {} s", name,
                bound, what, wait, error);
        executor.schedule(() -> {
            synchronized (this) {
                if (!isGone()) {
                    attempt.run();
                }
            }
        }, wait, TimeUnit.SECONDS);
        wait = Math.min(2 * wait, LONGEST_WAIT);
    }

    // The log

    private long oldestLedger() {
        return ledger.getLedgersInfo().isEmpty() ? -1 : ledger.getLedgersInfo().firstKey();
    }

    private void read() {
        live = false;
        if (loaded.isDone()) {
            loaded = new CompletableFuture<>();
        }
        try {
            next(ledger.newNonDurableCursor(applied, "__txnbuffer-load-" + System.nanoTime()));
        } catch (ManagedLedgerException error) {
            again("its log cannot be read", error, this::read);
        }
    }

    private synchronized void next(ManagedCursor cursor) {
        Position last = ledger.getLastConfirmedEntry();
        if (closed || applied.compareTo(last) >= 0 || !cursor.hasMoreEntries()) {
            ledger.asyncDeleteCursor(cursor.getName(), IGNORED, null);
            finish(last);
            return;
        }
        ManagedLedgerUtils.readEntries(cursor, ENTRIES, BYTES, PositionFactory.LATEST)
                .thenAcceptAsync(entries -> {
            if (apply(entries)) {
                next(cursor);
            } else {
                ledger.asyncDeleteCursor(cursor.getName(), IGNORED, null);
            }
        }, executor).exceptionally(error -> {
            ledger.asyncDeleteCursor(cursor.getName(), IGNORED, null);
            again("its log cannot be read", error, this::read);
            return null;
        });
    }

    /** Whether what follows the last entry that was read is still there; ledgers may be trimmed meanwhile. */
    private boolean isComplete() {
        return oldestLedger() <= Math.max(oldestLedger, applied.getLedgerId());
    }

    /** False if there may be entries before these that were trimmed meanwhile: a newer snapshot has them. */
    private synchronized boolean apply(List<Entry> entries) {
        boolean complete = isComplete();
        for (Entry entry : entries) {
            if (complete) {
                apply(entry.getPosition(), entry.getDataBuffer());
            }
            entry.release();
        }
        if (complete) {
            publish();
        } else {
            load();
        }
        return complete;
    }

    private void finish(Position last) {
        if (!isComplete()) {
            load();
            return;
        }
        if (applied.compareTo(last) < 0) { // nothing was stored in between, or it was trimmed
            applied = last;
            if (last.getEntryId() >= 0) {
                rules.entry(last.getLedgerId(), last.getEntryId());
            }
        }
        live = true;
        succeeded();
        publish();
        log.info("[{}] txnbuffer: read the log to {}, plain consumers may read to {}", name, applied, bound);
        loaded.complete(null);
    }

    static final DeleteCursorCallback IGNORED = new DeleteCursorCallback() {
        @Override
        public void deleteCursorComplete(Object context) {
        }

        @Override
        public void deleteCursorFailed(ManagedLedgerException error, Object context) {
        }
    };
}
