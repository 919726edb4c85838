package txnbuffer.broker;

import java.io.IOException;
import java.io.InputStream;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.NavigableSet;
import java.util.TreeMap;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import java.util.stream.LongStream;
import org.apache.avro.Schema;
import org.apache.avro.io.BinaryDecoder;
import org.apache.avro.io.DecoderFactory;
import org.bouncycastle.crypto.digests.Blake2bDigest;
import txnbuffer.broker.Rules.Coordinator;
import txnbuffer.broker.Rules.Open;
import txnbuffer.broker.Rules.Place;
import txnbuffer.broker.Rules.Txn;

/**
 * The snapshot of one data topic, read from the entries of the snapshot topic (docs/snapshot-format.md); no class of
 * the broker is used. snapshots/format.py, snapshots/scan.py and txnbuffer/recovery/codec.py are the same in Python,
 * and the schemas in this jar are the files that Python uses.
 *
 * <p>Pass each message of the topic's partition to {@code put}, in log order: {@code partition} names it. Then
 * {@code read} checks that the entries belong together, and returns what they say. It throws Refused for a snapshot
 * that is damaged or, if {@code newer}, of a later version. The owner writes and the broker compacts meanwhile, so
 * damage counts only if it is there again after reading on to a fresh end, and after reading again from the start.
 */
final class Snapshot {
    static final String TOPIC = "__txnbuffer_snapshots";
    /** The versions of entries that it reads, the newest one last. */
    static final List<String> ENDS = List.of("1", "2", "3"), PARTS = List.of("1");

    private static final String OWNER = "__owner";
    private static final int DIGEST = 16;
    private static final Pattern NUMBERED = Pattern.compile("([ms]?)([1-9][0-9]{0,17})");

    /** A snapshot that must not be used; until an operator repairs it, nothing of the topic is delivered. */
    static final class Refused extends Exception {
        final boolean newer;

        Refused(String entry, String what, boolean newer) {
            super("snapshot entry " + entry + ": " + what);
            this.newer = newer;
        }
    }

    /**
     * NONE: the topic has no snapshot, so it has had no transactions. DELETED: it was unregistered on purpose, though
     * its log may hold transactions: the whole log decides. STATE: `rules` are those of the snapshot.
     */
    enum Kind { NONE, DELETED, STATE }

    /** `applied`: the last message that `rules` have, NOTHING if none; -1 is no ledger. */
    record Found(Kind kind, Rules rules, Place applied, long origin, long following) {
        static Found without(Kind kind) {
            return new Found(kind, null, Rules.NOTHING, -1, -1);
        }
    }

    /** Where to begin with the log: with the messages after a place, and if `anew` with new rules from their start. */
    record Resume(boolean anew, Place after) { }

    private record Stored(String version, String kind, long epoch, byte[] value) { }

    private final String topic;
    private final Map<String, Stored> entries = new HashMap<>(); // by what follows the topic's name in the key
    private long owner;

    Snapshot(String topic) {
        this.topic = topic;
    }

    // The partition of a topic

    /** The number of shards: `annotation` is that of the snapshot topic, null without one. */
    static int shards(String annotation, int partitions) {
        Matcher recorded = Pattern.compile("shards=([1-9][0-9]{0,8})").matcher(annotation == null ? "" : annotation);
        return Math.max(1, partitions > 0 && recorded.matches() ? Integer.parseInt(recorded.group(1)) : partitions);
    }

    /** The name of the snapshot topic that has the entries of a data topic, both within the namespace. */
    static String partition(String topic, int shards) {
        return shards == 1 ? TOPIC : TOPIC + "-partition-" + shard(topic, shards);
    }

    static int shard(String topic, int shards) {
        try {
            byte[] hash = MessageDigest.getInstance("SHA-256").digest(topic.getBytes(StandardCharsets.UTF_8));
            return (int) Long.remainderUnsigned(ByteBuffer.wrap(hash).getLong(), shards);
        } catch (NoSuchAlgorithmException error) {
            throw new IllegalStateException(error);
        }
    }

    // The entries

    /** The next message; entries of fenced owners and of other topics are ignored. `value` is null if it has none. */
    void put(String key, Map<String, String> properties, byte[] value) {
        if (key == null) {
            return;
        }
        String version = properties.getOrDefault("tb.v", "");
        String text = properties.getOrDefault("tb.epoch", "");
        Stored stored = new Stored(version, properties.getOrDefault("tb.kind", ""),
                text.matches("[0-9]{1,18}") ? Long.parseLong(text) : -1, value);
        if (key.equals(OWNER)) {
            owner = Math.max(owner, stored.epoch);
        } else if (key.startsWith(topic + "-") && (stored.epoch < 0 || stored.epoch >= owner)) {
            String suffix = key.substring(topic.length() + 1);
            if (suffix.equals("end") || NUMBERED.matcher(suffix).matches()) {
                if (value == null) {
                    entries.remove(suffix);
                } else {
                    entries.put(suffix, stored);
                }
            }
        }
    }

    /** What the entries say of the topic with this incarnation, the property `txnbuffer.incarnation`, or null. */
    Found read(String incarnation) throws Refused {
        if (entries.isEmpty()) {
            return Found.without(Kind.NONE);
        }
        Map<String, Object> end = end();
        if (!end.get("incarnation").equals(incarnation)) {
            return Found.without(Kind.NONE); // of a topic of the same name that was deleted
        }
        if ((boolean) end.get("deleted")) {
            return Found.without(Kind.DELETED);
        }
        byte[] state = state(end);
        try {
            return restored(end, decode("state-1", state));
        } catch (IOException | RuntimeException error) {
            throw damaged("end", String.valueOf(error.getMessage()));
        }
    }

    private Refused damaged(String suffix, String what) {
        return new Refused(topic + "-" + suffix, what, false);
    }

    private Map<String, Object> end() throws Refused {
        Stored stored = checked("end", "end", ENDS);
        Map<String, Object> end = sealed("end", "end-" + (stored.version.equals("3") ? "2" : stored.version), stored.value);
        long first = (long) end.get("first_part");
        if (first < 1 || first > (long) end.get("next_part") || (long) end.get("snapshot_id") < 1
                || (long) end.get("next_spill") <= ((List<?>) end.get("spills")).size()) {
            throw damaged("end", "its numbers contradict each other");
        }
        if (!end.get("topic").equals(topic) || (long) end.get("epoch") != stored.epoch) {
            throw damaged("end", "it is of topic " + end.get("topic") + " and epoch " + end.get("epoch"));
        }
        return end;
    }

    /** The entry with these versions, of which only later ones are `newer`. */
    private Stored checked(String suffix, String kind, List<String> versions) throws Refused {
        Stored stored = entries.get(suffix);
        if (stored == null) {
            throw damaged(suffix, "it is missing");
        }
        if (!versions.contains(stored.version)) {
            throw new Refused(topic + "-" + suffix, "its format has the version '" + stored.version
                    + "', which this plug-in cannot read", stored.version.matches("[0-9]+"));
        }
        if (!stored.kind.equals(kind)) {
            throw damaged(suffix, "its properties are not those of a " + kind + " entry");
        }
        return stored;
    }

    private byte[] state(Map<String, Object> end) throws Refused {
        List<?> digests = (List<?>) end.get("spills");
        if (digests.isEmpty()) {
            return (byte[]) end.get("state");
        }
        List<byte[]> pieces = new ArrayList<>();
        for (int i = 0; i < digests.size(); i++) {
            String suffix = "s" + ((long) end.get("next_spill") - digests.size() + i);
            Stored stored = entries.get(suffix);
            if (stored == null || !stored.kind.equals("spill")
                    || !Arrays.equals(digest(stored.value, stored.value.length), (byte[]) digests.get(i))) {
                throw damaged(suffix, "it is missing, or its digest is not the one in the end entry");
            }
            pieces.add(stored.value);
        }
        ByteBuffer all = ByteBuffer.allocate(pieces.stream().mapToInt(piece -> piece.length).sum());
        pieces.forEach(all::put);
        return all.array();
    }

    // The state

    private Found restored(Map<String, Object> end, Map<String, Object> state) throws Refused, IOException {
        if (!state.get("part_first").equals(end.get("first_part")) || (long) state.get("part_first")
                + (long) state.get("parts") != (long) end.get("next_part")) {
            throw damaged("end", "its state and its head name different segments");
        }
        Rules rules = new Rules();
        rules.hidden.trim((long) state.get("first_ledger"));
        segments(end, state, rules.hidden);
        items(state, "tail_", rules.hidden);

        int count = count(state, "ongoing");
        long[] most = column(state, "ongoing_most", count), least = column(state, "ongoing_least", count);
        long[] highest = column(state, "ongoing_highest", count), accepted = column(state, "ongoing_accepted", count);
        Place[] firsts = places(state, "ongoing_first", count), befores = places(state, "ongoing_before", count);
        List<Open> open = new ArrayList<>();
        for (int i = 0; i < count; i++) {
            open.add(new Open(new Txn(most[i], least[i]), firsts[i], entryBefore(befores[i], firsts[i]), highest[i],
                    accepted[i]));
        }
        Place applied = place(state, "applied");
        rules.restored(applied, open, coordinators(state), (long) state.get("damaged"));
        return new Found(Kind.STATE, rules, applied, (long) state.get("origin_ledger"),
                (long) state.get("following_ledger"));
    }

    /** The entry that ends with or before the place `before`, and is not the one of `first`. */
    private static Place entryBefore(Place before, Place first) {
        boolean same = before.ledger() == first.ledger() && before.entry() == first.entry();
        return same ? new Place(first.ledger(), first.entry() - 1, -1) : before.whole();
    }

    private static Map<Long, Coordinator> coordinators(Map<String, Object> state) throws IOException {
        int count = count(state, "coordinators");
        long[] most = column(state, "coordinator_most", count);
        long[] marks = column(state, "coordinator_low_water_mark", count);
        long[] epochs = column(state, "coordinator_epoch", count);
        List<?> committed = (List<?>) state.get("coordinator_committed");
        List<?> aborted = (List<?>) state.get("coordinator_aborted");
        if (committed.size() != count || aborted.size() != count) {
            throw new IOException("the bitmaps are not one for each coordinator");
        }
        Map<Long, Coordinator> found = new HashMap<>();
        for (int i = 0; i < count; i++) {
            Coordinator coordinator = new Coordinator();
            coordinator.lowWaterMark = marks[i];
            coordinator.epoch = epochs[i];
            coordinator.ended.addPortable((byte[]) committed.get(i));
            coordinator.ended.addPortable((byte[]) aborted.get(i));
            found.put(most[i], coordinator);
        }
        return found;
    }

    private void segments(Map<String, Object> end, Map<String, Object> state, Hidden hidden)
            throws Refused, IOException {
        long first = (long) end.get("first_part");
        int count = count(state, "parts");
        long[] ledgers = column(state, "part_last_ledger", count);
        long[] aborts = column(state, "part_aborts", count), ranges = column(state, "part_ranges", count);
        byte[] chain = (byte[]) end.get("chain_first");
        byte[] start = (topic + "\0" + end.get("incarnation")).getBytes(StandardCharsets.UTF_8);
        if (first == 1 && !Arrays.equals(chain, digest(start, start.length))) {
            throw damaged("end", "its chain does not start with the digest of this topic");
        }
        long epoch = 0;
        for (int i = 0; i < count; i++) {
            String suffix = String.valueOf(first + i);
            Stored stored = checked(suffix, "part", PARTS);
            Map<String, Object> part = sealed(suffix, "part-1", stored.value);
            long own = (long) part.get("epoch");
            if (!part.get("topic").equals(topic) || (long) part.get("number") != first + i || own != stored.epoch
                    || own < epoch || own > (long) end.get("epoch")
                    || !Arrays.equals((byte[]) part.get("chain_before"), chain)
                    || (long) part.get("aborts") != aborts[i] || (long) part.get("ranges") != ranges[i]
                    || (long) part.get("high_ledger") != ledgers[i]) {
                throw damaged(suffix, "it does not follow the segment before it, or is not the one of the end entry");
            }
            items(part, "", hidden);
            chain = (byte[]) part.get("chain_after");
            epoch = own;
        }
        if (!Arrays.equals(chain, (byte[]) end.get("chain_next"))) {
            throw damaged("end", "its chain does not end with the last segment");
        }
    }

    private static void items(Map<String, Object> values, String prefix, Hidden hidden) throws IOException {
        int aborts = count(values, prefix + "aborts"), ranges = count(values, prefix + "ranges");
        long[] most = column(values, prefix + "most", aborts), least = column(values, prefix + "least", aborts);
        long[] ledgers = column(values, prefix + "marker_ledger", aborts);
        for (int i = 0; i < aborts; i++) {
            hidden.abort(new Txn(most[i], least[i]), ledgers[i]);
        }
        Place[] firsts = places(values, prefix + "first", ranges), lasts = places(values, prefix + "last", ranges);
        for (int i = 0; i < ranges; i++) {
            hidden.suppress(firsts[i], lasts[i], Rules.NOTHING);
        }
    }

    /**
     * Where to begin with the log of a topic with a STATE, given the ledgers that exist. `unused`: the log has never
     * held anything but epoch markers, so the cluster may have replaced its first ledger while that was empty.
     */
    static Resume resume(Found found, NavigableSet<Long> ledgers, boolean unused) throws Refused {
        if (!found.applied.equals(Rules.NOTHING) && ledgers.contains(found.applied.ledger())) {
            return new Resume(false, found.applied);
        }
        if (ledgers.contains(found.following)) {
            return new Resume(false, new Place(found.following, -1, -1));
        }
        long first = ledgers.first();
        if (found.origin == first && first >= 0 || unused && found.applied.equals(Rules.NOTHING)) {
            return new Resume(true, new Place(first, -1, -1)); // nothing was ever trimmed
        }
        throw new Refused("end", "it ends at " + found.applied + ", but the log begins with ledger " + first
                + " and messages between may be missing", false);
    }

    // Avro, digests and columns

    private static final Map<String, Schema> SCHEMAS = new TreeMap<>();

    static {
        for (String name : List.of("end-1", "end-2", "part-1", "state-1")) {
            try (InputStream in = Snapshot.class.getResourceAsStream("/txnbuffer/schemas/" + name + ".avsc")) {
                SCHEMAS.put(name, new Schema.Parser().parse(in));
            } catch (IOException error) {
                throw new IllegalStateException("the jar lacks the schema " + name, error);
            }
        }
    }

    /** A record whose last field is the digest of all bytes before. */
    private Map<String, Object> sealed(String suffix, String schema, byte[] value) throws Refused {
        int length = Math.max(0, value.length - DIGEST);
        if (!Arrays.equals(digest(value, length), Arrays.copyOfRange(value, length, value.length))) {
            throw damaged(suffix, "its digest is wrong");
        }
        try {
            return decode(schema, value);
        } catch (IOException | RuntimeException error) {
            throw damaged(suffix, String.valueOf(error.getMessage()));
        }
    }

    private static byte[] digest(byte[] data, int length) {
        Blake2bDigest digest = new Blake2bDigest(8 * DIGEST);
        digest.update(data, 0, length);
        byte[] found = new byte[DIGEST];
        digest.doFinal(found, 0);
        return found;
    }

    private static Map<String, Object> decode(String schema, byte[] data) throws IOException {
        BinaryDecoder in = DecoderFactory.get().binaryDecoder(data, null);
        Map<String, Object> values = new HashMap<>();
        for (Schema.Field field : SCHEMAS.get(schema).getFields()) {
            values.put(field.name(), value(field.schema(), in));
        }
        if (!in.isEnd()) {
            throw new IOException("more bytes follow the record " + schema);
        }
        return values;
    }

    private static Object value(Schema schema, BinaryDecoder in) throws IOException {
        switch (schema.getType()) {
            case LONG:
                return in.readLong();
            case BOOLEAN:
                return in.readBoolean();
            case STRING:
                return in.readString();
            case BYTES:
                ByteBuffer bytes = in.readBytes(null);
                return Arrays.copyOfRange(bytes.array(), bytes.position(), bytes.limit());
            case FIXED:
                byte[] fixed = new byte[schema.getFixedSize()];
                in.readFixed(fixed);
                return fixed;
            case ARRAY:
                return schema.getElementType().getType() == Schema.Type.LONG ? numbers(in) : list(schema, in);
            default:
                throw new IOException("a field of another type: " + schema);
        }
    }

    private static List<Object> list(Schema schema, BinaryDecoder in) throws IOException {
        List<Object> found = new ArrayList<>();
        for (long left = in.readArrayStart(); left > 0; left = in.arrayNext()) {
            for (; left > 0; left--) {
                found.add(value(schema.getElementType(), in));
            }
        }
        return found;
    }

    /** A column: each number is stored as its difference from the one before. */
    private static long[] numbers(BinaryDecoder in) throws IOException {
        LongStream.Builder found = LongStream.builder();
        long sum = 0;
        for (long left = in.readArrayStart(); left > 0; left = in.arrayNext()) {
            for (; left > 0; left--) {
                sum += in.readLong();
                found.add(sum);
            }
        }
        return found.build().toArray();
    }

    private static int count(Map<String, Object> values, String name) {
        return Math.toIntExact((long) values.get(name));
    }

    /** A column with so many rows; if all are equal, one may be stored. */
    private static long[] column(Map<String, Object> values, String name, int count) throws IOException {
        long[] stored = (long[]) values.get(name);
        if (stored.length == count) {
            return stored;
        }
        if (stored.length != 1 || count < 1) {
            throw new IOException("the column " + name + " has " + stored.length + " numbers for " + count + " rows");
        }
        long[] all = new long[count];
        Arrays.fill(all, stored[0]);
        return all;
    }

    private static Place[] places(Map<String, Object> values, String name, int count) throws IOException {
        long[] ledgers = column(values, name + "_ledger", count), entries = column(values, name + "_entry", count);
        long[] batches = column(values, name + "_batch", count);
        Place[] found = new Place[count];
        for (int i = 0; i < count; i++) {
            found[i] = new Place(ledgers[i], entries[i], Math.toIntExact(batches[i]));
        }
        return found;
    }

    private static Place place(Map<String, Object> values, String name) {
        return new Place((long) values.get(name + "_ledger"), (long) values.get(name + "_entry"),
                Math.toIntExact((long) values.get(name + "_batch")));
    }
}
