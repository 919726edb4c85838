package txnbuffer.broker;

import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/**
 * The log protocol of txnbuffer, version 1 (docs/log-protocol.md): a fold over the messages of one topic, without a
 * class of the broker. It says up to which entry a plain consumer may read, and what is hidden up to there. The same
 * rules in Python are txnbuffer/buffer/buffer.py and txnbuffer/protocol.py; generated histories run against both.
 *
 * <p><b>Start.</b> New rules know nothing: {@code bound()} is NOTHING, and a message is refused. One of these calls
 * tells them where the log begins for them:
 * <ul>
 * <li>{@code fromStart()}: the first message passed is the first that the topic ever had.
 * <li>{@code unregistered(end)}: a topic without a snapshot, which has had no transactions: all up to the entry
 *     {@code end} is ordinary and may be delivered at once.
 * <li>{@code Snapshot.read}: returns rules as of the snapshot. {@code Snapshot.resume} says after which place to pass
 *     the log; messages that the snapshot has already are skipped, so a packed entry may be passed again whole.
 * </ul>
 * {@code replayUntil(end)}, before the replay, holds the bound where it is until the entry {@code end} was passed.
 *
 * <p><b>Input</b>, by one thread at a time, in log order: {@code message(place, properties, value)} for each message of
 * an entry, then {@code entry(ledger, entry)}. If no message of an entry has a property that begins with "tb.",
 * {@code entry} is enough. {@code record} is the same for records as txnbuffer writes them. Properties whose names do
 * not begin with "tb." may be left out, and {@code value} is read only if there is {@code tb.marker}; it is null if
 * Pulsar has the null value. If a name occurs twice, its last value counts. {@code stop(place, why)} is for an entry
 * that the caller cannot read. All but {@code trim} belong to this one thread, also {@code questioned}.
 *
 * <p><b>Output</b>, for any thread: {@code bound()}, the last entry that may be delivered, never moves back. It is a
 * real entry, or one that ends with -1: all ledgers below. {@code hiddenRows(place, properties)} is asked for messages
 * up to the bound only, and its answer never changes: the first so many rows of the message are hidden, the rest is
 * visible; {@code rows(place, properties)} is how many it has. A message that is no record set has one row.
 * {@code without(hidden, properties)} are the properties of a record set without its first rows.
 * {@code isHidden(place, txn)} is the same as {@code hiddenRows} for what {@code record} takes, and
 * {@code isVisible(ledger, entry)} says of most entries that nothing of them is hidden.
 * {@code stopped()} says why nothing more becomes visible, or null. {@code reserved(name)}: whether a property is
 * one of the protocol.
 *
 * <p><b>Lost snapshots.</b> A topic gets a snapshot before its first transaction. So in an unregistered topic a record with
 * an id, and a marker of transactions, stops the bound before its entry ({@code questioned()}). The caller takes a fresh
 * end of the snapshot topic and reads to it. If there is a snapshot now, rules made from it replace these. If not, it was
 * lost, or another program copied properties, and the bound stays: readers in Python refuse the topic then. Dead letters
 * are no such records: they lose these properties before they are stored (Copies), or readers ignore them.
 *
 * <p><b>Memory</b>: aborted ids are bitmaps, suppressed messages are ranges of 16 bytes; {@code trim(firstLedger)}
 * forgets what only deleted ledgers need. Which transactions have ended is never forgotten above the low-water mark.
 */
final class Rules implements Visitor {
    static final String PREFIX = "tb.";
    private static final String VERSION = "tb.v";
    private static final String TXN = "tb.txn";
    private static final String SEQ = "tb.seq";
    private static final String RECORDS = "tb.records";
    private static final String MARKER = "tb.marker";
    private static final String REMOVED = "tb.removed";
    static final String ONE = "1"; // of version and marker
    private static final int LONGEST_NUMBER = 4300; // digits that the reader in Python accepts, leading zeros included

    record Txn(long most, long least) { }

    /** A message or row; batch is -1 for a message outside of a batch, and for an entry as a whole. */
    record Place(long ledger, long entry, int batch) implements Comparable<Place> {
        @Override
        public int compareTo(Place other) {
            int order = Long.compare(ledger, other.ledger);
            order = order != 0 ? order : Long.compare(entry, other.entry);
            return order != 0 ? order : Integer.compare(batch, other.batch);
        }

        Place whole() {
            return new Place(ledger, entry, -1);
        }

        @Override
        public String toString() {
            return ledger + ":" + entry + (batch < 0 ? "" : ":" + batch);
        }
    }

    static final Place NOTHING = new Place(-1, -1, -1);

    /** An open transaction: its first record, the last entry before that, and what was accepted of it. */
    static final class Open {
        final Txn txn;
        final Place first;
        final Place before;
        long highest;
        long accepted;

        Open(Txn txn, Place first, Place before, long highest, long accepted) {
            this.txn = txn;
            this.first = first;
            this.before = before;
            this.highest = highest;
            this.accepted = accepted;
        }
    }

    static final class Coordinator {
        long lowWaterMark;
        long epoch;
        final Ids ended = new Ids(); // above the low-water mark, whatever the outcome

        boolean hasEnded(long least) {
            return least <= lowWaterMark || ended.contains(least);
        }
    }

    private enum Phase { LOADING, UNREGISTERED, FOLDING, STOPPED }

    private final Map<Txn, Open> ongoing = new LinkedHashMap<>(); // in log order of their first records
    private final Map<Long, Coordinator> coordinators = new HashMap<>();
    final Hidden hidden = new Hidden();
    private final VisibleEntries visible = new VisibleEntries();
    private Phase phase = Phase.LOADING;
    private Place applied = NOTHING; // the last message applied: of a record set its last row
    private Place whole = NOTHING; // the last entry of which all is applied
    private Place until;
    private Place questioned; // the last entry before a record that only a registered topic has
    private volatile Place bound = NOTHING;
    private volatile String stopped;
    private volatile Open oldest;
    private volatile long damaged;

    // Start

    void fromStart() {
        begin(Phase.FOLDING, NOTHING);
    }

    void unregistered(Place end) {
        begin(Phase.UNREGISTERED, end);
    }

    /** The rules as of a snapshot: `open`, oldest first, and `coordinators` are complete, and so is `hidden`. */
    void restored(Place at, List<Open> open, Map<Long, Coordinator> known, long damagedBefore) {
        open.forEach(one -> ongoing.put(one.txn, one));
        coordinators.putAll(known);
        damaged = damagedBefore;
        begin(Phase.FOLDING, at);
    }

    private void begin(Phase next, Place at) {
        if (phase != Phase.LOADING) {
            throw new IllegalStateException("the rules have begun");
        }
        phase = next;
        applied = at;
        // A snapshot may lie within a packed entry, which then is passed again.
        whole = at.batch < 0 ? at : new Place(at.ledger, at.entry - 1, -1);
        decide();
    }

    void replayUntil(Place end) {
        until = end;
    }

    // Output

    Place bound() {
        return bound;
    }

    String stopped() {
        return stopped;
    }

    long damaged() {
        return damaged;
    }

    /** The oldest open transaction, for people who look for what holds a topic back; null if none is open. */
    Open oldest() {
        return oldest;
    }

    static boolean reserved(String property) {
        return property.startsWith(PREFIX);
    }

    static int rows(Place at, Map<String, String> properties) {
        return at.batch < 0 ? (int) Math.max(1, number(properties.get(RECORDS), Integer.MAX_VALUE)) : 1;
    }

    /** The properties that a record set without its first rows has instead of its own ones. */
    static Map<String, String> without(int hidden, Map<String, String> properties) {
        Map<String, String> found = new HashMap<>();
        found.put(RECORDS, "" + (number(properties.get(RECORDS), Integer.MAX_VALUE) - hidden));
        if (properties.containsKey(SEQ)) {
            found.put(SEQ, "" + (number(properties.get(SEQ), Long.MAX_VALUE) + hidden));
        }
        return found;
    }

    int hiddenRows(Place at, Map<String, String> properties) {
        if (properties.isEmpty()) {
            return 0;
        }
        int rows = rows(at, properties);
        if (properties.containsKey(MARKER) || properties.containsKey(REMOVED)) {
            return rows;
        }
        Txn txn = txn(properties.get(TXN));
        return txn != null && hidden.isAborted(txn) ? rows : hidden.suppressed(first(at, properties), rows);
    }

    boolean isHidden(Place at, Txn txn) {
        return hidden.isAborted(txn) || hidden.suppressed(at, 1) > 0;
    }

    /** Whether nothing of an entry up to the bound is hidden; of some such entries that is not known. */
    boolean isVisible(long ledger, long entry) {
        return visible.contains(ledger, entry);
    }

    /** The place of the first row: the rows of a record set have the batch indexes 0, 1, 2 ... */
    private static Place first(Place at, Map<String, String> properties) {
        boolean set = at.batch < 0 && number(properties.get(RECORDS), Integer.MAX_VALUE) > 0;
        return set ? new Place(at.ledger, at.entry, 0) : at;
    }

    // Unregistered topics

    boolean isUnregistered() {
        return phase == Phase.UNREGISTERED;
    }

    boolean questioned() {
        return questioned != null;
    }

    // The fold

    void stop(Place at, String why) {
        phase = Phase.STOPPED;
        stopped = why + " at " + at;
        until = null; // no later entry will end the replay
        decide();
    }

    void entry(long ledger, long entry) {
        Place at = new Place(ledger, entry, -1);
        if (phase == Phase.LOADING) {
            throw new IllegalStateException("the start of the log is not known");
        }
        if (phase != Phase.STOPPED && at.compareTo(whole) > 0) {
            whole = at;
            applied = at.compareTo(applied) > 0 ? at : applied;
            visible.entry(at);
            decide();
        }
    }

    private void decide() {
        Open open = ongoing.isEmpty() ? null : ongoing.values().iterator().next();
        oldest = open;
        Place end = questioned != null ? questioned : open != null ? open.before : whole;
        visible.decide(end, hidden::isAborted);
        if (until != null && whole.compareTo(until) < 0) {
            return; // the replay goes on
        }
        until = null;
        bound = end;
    }

    /** Whether a message is to be applied. */
    private boolean isNew(Place at) {
        if (phase == Phase.LOADING) {
            throw new IllegalStateException("the start of the log is not known");
        }
        boolean found = phase != Phase.STOPPED && at.compareTo(applied) > 0;
        visible.message(found);
        return found;
    }

    @Override
    public void record(Place at, Txn txn, long seq) {
        if (!isNew(at)) {
            return;
        }
        if (phase == Phase.UNREGISTERED) {
            question();
        } else {
            accept(at, 1, txn, seq);
        }
        applied = at;
    }

    @Override
    public void message(Place at, Map<String, String> properties, ByteBuffer value) {
        if (!isNew(at)) {
            return;
        }
        if (properties.isEmpty()) {
            applied = at;
            return;
        }
        try {
            apply(at, properties, value);
        } catch (RuntimeException error) {
            stop(at, "a message that cannot be applied (" + error.getMessage() + ")"); // rule 7
        }
        if (phase != Phase.STOPPED) {
            applied = last(first(at, properties), rows(at, properties));
        }
    }

    private static Place last(Place first, long rows) {
        return rows == 1 ? first : new Place(first.ledger, first.entry, (int) (first.batch + rows - 1));
    }

    private void apply(Place at, Map<String, String> properties, ByteBuffer value) {
        String version = properties.get(VERSION);
        if (properties.containsKey(MARKER) || properties.containsKey(REMOVED)) {
            visible.hide();
        }
        if (version != null && !version.equals(ONE)) {
            stop(at, "a message of version " + version + " of the protocol"); // rule 7
        } else if (phase == Phase.UNREGISTERED && isOfTransaction(properties, value)) {
            question();
        } else if (properties.containsKey(MARKER)) {
            if (version == null || !properties.get(MARKER).equals(ONE) || value == null) {
                throw new IllegalArgumentException("its properties are not those of a marker");
            }
            marker(at, Marker.read(value.duplicate()));
        } else {
            record(at, properties, version != null);
        }
    }

    private void question() {
        questioned = questioned == null ? whole : questioned;
    }

    private static boolean isOfTransaction(Map<String, String> properties, ByteBuffer value) {
        try {
            return properties.containsKey(TXN) || properties.containsKey(MARKER)
                    && (value == null || Marker.read(value.duplicate()).outcomes.length > 0);
        } catch (RuntimeException damaged) {
            return true;
        }
    }

    private void record(Place at, Map<String, String> properties, boolean versioned) {
        long size = 1;
        boolean refused = false;
        if (properties.containsKey(RECORDS)) {
            size = number(properties.get(RECORDS), Integer.MAX_VALUE);
            refused = size < 1 || at.batch >= 0 || !versioned;
        }
        Place first = first(at, properties);
        int rows = rows(at, properties);
        if (!properties.containsKey(TXN) && !properties.containsKey(SEQ)) {
            if (refused) {
                suppress(first, rows); // rule 7
            }
            return;
        }
        Txn txn = txn(properties.get(TXN));
        long seq = number(properties.get(SEQ), Long.MAX_VALUE);
        if (refused || !versioned || txn == null || seq < 1 || seq - 1 > Long.MAX_VALUE - size) {
            suppress(first, rows); // rule 7
        } else {
            accept(first, size, txn, seq);
        }
    }

    private void accept(Place first, long size, Txn txn, long seq) {
        visible.record(txn);
        Open open = ongoing.get(txn);
        if (open == null) {
            Coordinator coordinator = coordinators.get(txn.most);
            if (coordinator != null && coordinator.hasEnded(txn.least)) {
                suppress(first, size); // rule 1
            } else {
                ongoing.put(txn, new Open(txn, first, whole, seq + size - 1, size));
            }
            return;
        }
        long repeated = Math.max(0, Math.min(size, open.highest - seq + 1));
        if (repeated > 0) {
            suppress(first, repeated); // rule 2
        }
        if (repeated < size) {
            open.highest = seq + size - 1;
            open.accepted += size - repeated;
        }
    }

    private void suppress(Place first, long rows) {
        visible.hide();
        hidden.suppress(first, last(first, rows), applied);
    }

    /** The items of a marker are read whole before the first is applied: a marker counts as a whole or stops. */
    private record Marker(long most, long epoch, long lowWaterMark, boolean decided, List<Long> least, byte[] outcomes,
            List<Long> records) {
        static Marker read(ByteBuffer in) {
            long most = number(in), epoch = number(in), lowWaterMark = number(in);
            int flag = in.get();
            List<Long> least = numbers(in);
            long size = number(in);
            if (size < 0 || size > in.remaining()) {
                throw new IllegalArgumentException("its outcomes are cut");
            }
            byte[] outcomes = new byte[(int) size];
            in.get(outcomes);
            List<Long> records = numbers(in);
            if (in.hasRemaining() || least.size() != outcomes.length || records.size() != outcomes.length
                    || flag < 0 || flag > 1 || most < 0 || epoch < 0 || lowWaterMark < 0) {
                throw new IllegalArgumentException("its fields contradict each other");
            }
            long sum = 0;
            for (int i = 0; i < outcomes.length; i++) {
                sum = Math.addExact(sum, least.get(i));
                least.set(i, sum);
                if (sum < 1 || outcomes[i] < 0 || outcomes[i] > 1 || records.get(i) < 0) {
                    throw new IllegalArgumentException("an item is out of range");
                }
            }
            return new Marker(most, epoch, lowWaterMark, flag == 1, least, outcomes, records);
        }
    }

    private void marker(Place at, Marker marker) {
        Coordinator coordinator = coordinators.computeIfAbsent(marker.most, key -> new Coordinator());
        if (marker.decided || marker.epoch >= coordinator.epoch) { // rule 4
            for (int i = 0; i < marker.outcomes.length; i++) {
                Txn txn = new Txn(marker.most, marker.least.get(i));
                end(at, coordinator, txn, marker.outcomes[i] == 1, marker.records.get(i));
            }
        }
        if (marker.lowWaterMark > coordinator.lowWaterMark) { // rule 5: after the items
            coordinator.lowWaterMark = marker.lowWaterMark;
            coordinator.ended.removeUpTo(marker.lowWaterMark);
        }
        coordinator.epoch = Math.max(coordinator.epoch, marker.epoch);
    }

    private void end(Place at, Coordinator coordinator, Txn txn, boolean committed, long records) {
        Open open = ongoing.remove(txn);
        if (open == null && coordinator.hasEnded(txn.least)) {
            return; // rule 3
        }
        if (!committed && open != null) { // rule 3: an ABORT without a record enters the ended set only
            hidden.abort(txn, at.ledger);
        } else if (committed && (open == null ? 0 : open.accepted) != records) {
            damaged++; // rule 6
        }
        if (txn.least > coordinator.lowWaterMark) {
            coordinator.ended.add(txn.least);
        }
    }

    void trim(long firstLedger) {
        hidden.trim(firstLedger);
        visible.trim(firstLedger);
    }

    // Values of the protocol

    private static List<Long> numbers(ByteBuffer in) {
        List<Long> found = new ArrayList<>();
        for (long count = number(in); count != 0; count = number(in)) {
            if (count < 0) { // Avro: then the size of the block in bytes follows
                count = -count;
                number(in);
            }
            for (; count > 0; count--) {
                found.add(number(in));
            }
        }
        return found;
    }

    private static long number(ByteBuffer in) {
        long raw = 0;
        for (int shift = 0; shift < 70; shift += 7) {
            byte next = in.get();
            if (shift == 63 && (next & 0xFF) > 1) {
                break;
            }
            raw |= (next & 0x7FL) << shift;
            if (next >= 0) {
                return (raw >>> 1) ^ -(raw & 1);
            }
        }
        throw new IllegalArgumentException("a number has more than 64 bits");
    }

    /** The id in a text `most:least`; null if it is none. */
    static Txn txn(String text) {
        int colon = text == null ? -1 : text.indexOf(':');
        if (colon < 1) {
            return null;
        }
        long most = digits(text.substring(0, colon)), least = digits(text.substring(colon + 1));
        return most < 0 || least < 1 ? null : new Txn(most, least);
    }

    private static long number(String text, long limit) {
        long found = text == null || text.length() > 19 ? -1 : digits(text);
        return found >= 1 && found <= limit ? found : -1;
    }

    private static long digits(String text) {
        for (int i = 0; i < text.length(); i++) {
            if (text.charAt(i) < '0' || text.charAt(i) > '9') {
                return -1;
            }
        }
        try {
            return text.length() > LONGEST_NUMBER ? -1 : Long.parseLong(text);
        } catch (NumberFormatException emptyOrTooLarge) {
            return -1;
        }
    }
}
