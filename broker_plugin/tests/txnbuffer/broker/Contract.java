package txnbuffer.broker;

import io.netty.buffer.ByteBuf;
import io.netty.buffer.ByteBufUtil;
import io.netty.buffer.Unpooled;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.lang.management.ManagementFactory;
import java.lang.management.MemoryPoolMXBean;
import java.lang.management.MemoryUsage;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.TreeSet;
import org.apache.bookkeeper.mledger.Position;
import org.apache.bookkeeper.mledger.PositionFactory;
import org.apache.bookkeeper.mledger.impl.EntryImpl;
import org.apache.pulsar.broker.ServiceConfiguration;
import org.apache.pulsar.broker.service.plugin.EntryFilter;
import org.apache.pulsar.common.api.proto.MessageMetadata;
import org.apache.pulsar.common.api.proto.SingleMessageMetadata;
import org.apache.pulsar.common.protocol.Commands;
import txnbuffer.broker.Rules.Place;

/** Runs the commands that tests/java_rules.py writes, one a line; some are answered by one line. */
public final class Contract {
    private record Message(Place at, Map<String, String> properties) { }

    private Rules rules = new Rules();
    private Snapshot snapshot;
    private Snapshot.Found found;
    private final List<Message> log = new ArrayList<>(); // all messages, decided ones first
    private final Map<Place, byte[]> entries = new HashMap<>();
    private int decided; // messages of the log
    private long firstLedger; // nothing of the ledgers below is asked: they are deleted

    public static void main(String[] arguments) throws Exception {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        Contract contract = new Contract();
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String answer;
            try {
                answer = contract.run(line.split(" "));
            } catch (RuntimeException error) {
                answer = "error " + error;
            }
            if (answer != null) {
                System.out.println(answer);
                System.out.flush();
            }
        }
    }

    private String run(String[] words) {
        switch (words[0]) {
            case "new":
                rules = new Rules();
                log.clear();
                entries.clear();
                decided = 0;
                firstLedger = 0;
                return null;
            case "start":
                rules.fromStart();
                return null;
            case "unregistered":
                rules.unregistered(place(words, 1));
                return null;
            case "entry":
                return entry(place(words, 1), words.length > 4 ? bytes(words[4]) : null);
            case "delivered":
                return delivered(place(words, 1));
            case "scan": // MESSAGE, of a batch
                return scan(bytes(words[1]));
            case "cut": // HIDDEN ROWS VALUE
                return cut(Integer.parseInt(words[1]), Integer.parseInt(words[2]), bytes(words[3]));
            case "until":
                rules.replayUntil(place(words, 1));
                return state();
            case "trim":
                firstLedger = Math.max(firstLedger, Long.parseLong(words[1]));
                rules.trim(firstLedger);
                return null;
            case "all":
                return all();
            case "abort": // COUNT STEP LEDGERS: the bytes that aborts take, and those left after they are trimmed
                return aborts(Long.parseLong(words[1]), Long.parseLong(words[2]), Integer.parseInt(words[3]));
            default:
                return ofSnapshots(words);
        }
    }

    private String ofSnapshots(String[] words) {
        switch (words[0]) {
            case "snapshot":
                snapshot = new Snapshot(text(words[1]));
                return null;
            case "put":
                ByteBuffer value = value(words[2]);
                snapshot.put(words[1].equals("-") ? null : text(words[1]), properties(words, 3),
                        value == null ? null : value.array());
                return null;
            case "read":
                return read(words[1].equals("-") ? null : text(words[1]));
            case "resume":
                return resume(words);
            case "partition":
                return Snapshot.partition(text(words[1]), Integer.parseInt(words[2])) + " "
                        + Snapshot.shard(text(words[1]), Integer.parseInt(words[2]));
            case "refusal": // VERSION NATIVE OVERRIDE: of a broker of that version with these two settings
                ServiceConfiguration conf = new ServiceConfiguration();
                conf.setTransactionCoordinatorEnabled(Boolean.parseBoolean(words[2]));
                conf.setAllowOverrideEntryFilters(Boolean.parseBoolean(words[3]));
                return String.valueOf(TxnTopicFactory.refusal(words[1], conf));
            case "lacking": // of an implementation of a reader, as of classes that a broker would extend
                return TxnTopicFactory.overridingNothing(Lacking.class).toList().toString();
            case "shards":
                return "" + Snapshot.shards(words[1].equals("-") ? null : text(words[1]), Integer.parseInt(words[2]));
            default:
                throw new IllegalArgumentException(words[0]);
        }
    }

    /** An entry was stored: pass it as the broker does. */
    private String entry(Place at, byte[] data) {
        if (data != null) {
            Position position = PositionFactory.create(at.ledger(), at.entry());
            try {
                Packed.visit(position, Unpooled.wrappedBuffer(data), new Visitor() {
                    @Override
                    public void record(Place place, Rules.Txn txn, long seq) {
                        rules.record(place, txn, seq);
                        add(new Message(place, Map.of("tb.v", "1", "tb.txn", txn.most() + ":" + txn.least(),
                                "tb.seq", "" + seq)));
                    }

                    @Override
                    public void message(Place place, Map<String, String> properties, ByteBuffer value) {
                        if (!properties.isEmpty() || at.entry() % 2 == 0) { // messages without any need not be passed
                            rules.message(place, properties, value);
                        }
                        add(new Message(place, properties));
                    }
                });
            } catch (IOException | RuntimeException error) { // as TopicLog
                rules.stop(at, "an entry that cannot be read");
            }
            entries.put(at, data);
        }
        rules.entry(at.ledger(), at.entry());
        return state();
    }

    private void add(Message message) {
        if (log.isEmpty() || log.get(log.size() - 1).at.compareTo(message.at) < 0) { // else it was passed before
            log.add(message);
        }
    }

    /** What plain consumers get of an entry. */
    private String delivered(Place at) {
        byte[] data = entries.get(at);
        EntryImpl entry = EntryImpl.create(at.ledger(), at.entry(), data.clone());
        try {
            MessageMetadata metadata = Commands.peekAndCopyMessageMetadata(entry.getDataBuffer(), "", -1);
            EntryFilter.FilterResult result = VisibleFilter.shown(rules, entry, metadata);
            byte[] found = ByteBufUtil.getBytes(entry.getDataBuffer());
            return rules.isVisible(at.ledger(), at.entry()) ? "remembered"
                    : result == EntryFilter.FilterResult.REJECT ? "hidden"
                    : Arrays.equals(found, data) ? "unchanged" : word(found);
        } catch (IOException error) {
            return "refused " + error.getMessage();
        } finally {
            entry.release();
        }
    }

    /** Whether the broker reads the same in a message that the scanner understands. */
    private static String scan(byte[] message) {
        Scanner scanner = new Scanner();
        ByteBuf own = Unpooled.wrappedBuffer(message), brokers = Unpooled.wrappedBuffer(message);
        Scanner.Kind kind = scanner.read(own);
        if (kind == Scanner.Kind.OTHER) {
            return "other";
        }
        SingleMessageMetadata metadata = new SingleMessageMetadata();
        try {
            Commands.deSerializeSingleMessageInBatch(brokers, metadata, 0, 1);
        } catch (IOException error) {
            return "different: " + error;
        }
        Map<String, String> found = new HashMap<>();
        metadata.getPropertiesList().forEach(pair -> found.put(pair.getKey(), pair.getValue()));
        found.keySet().removeIf(name -> !Rules.reserved(name));
        boolean same = kind == Scanner.Kind.ORDINARY ? found.isEmpty()
                : found.size() == 3 && found.get("tb.v").equals("1")
                && Rules.txn(found.get("tb.txn")).equals(scanner.txn())
                && Long.parseLong(found.get("tb.seq")) == scanner.seq();
        return same && own.readerIndex() == brokers.readerIndex() ? "same" : "different: " + found;
    }

    private static String cut(int hidden, int rows, byte[] value) {
        try {
            return word(RecordSet.withoutFirst(hidden, rows, Unpooled.wrappedBuffer(value)));
        } catch (IOException | RuntimeException error) {
            return "refused " + error;
        }
    }

    /** Bound, oldest open transaction, damage, whether it stopped, and how much is hidden of what is newly decided. */
    private String state() {
        StringBuilder hidden = new StringBuilder();
        for (; decided < log.size() && log.get(decided).at.whole().compareTo(rules.bound()) <= 0; decided++) {
            if (log.get(decided).at.ledger() >= firstLedger) {
                hidden.append(hidden.isEmpty() ? "" : ",").append(hiddenRows(log.get(decided)));
            }
        }
        Rules.Open open = rules.oldest();
        return shown(rules.bound()) + " " + (open == null ? "-" : open.txn.most() + ":" + open.txn.least()) + " "
                + rules.damaged() + " " + (rules.stopped() == null ? "runs" : "stopped")
                + (rules.questioned() ? " questioned" : " -") + " " + (hidden.isEmpty() ? "-" : hidden);
    }

    private String all() {
        StringBuilder hidden = new StringBuilder("-");
        for (Message one : log) {
            if (one.at.ledger() >= firstLedger && one.at.whole().compareTo(rules.bound()) <= 0) {
                hidden.append(",").append(hiddenRows(one));
            }
        }
        return hidden.toString();
    }

    private int hiddenRows(Message one) {
        int hidden = rules.hiddenRows(one.at, one.properties);
        if (hidden > Rules.rows(one.at, one.properties)) {
            throw new IllegalStateException("more rows are hidden than there are");
        }
        return hidden;
    }

    private String aborts(long count, long step, int ledgers) {
        Hidden hidden = rules.hidden;
        long before = usedMemory();
        for (long i = 0; i < count; i++) {
            hidden.abort(new Rules.Txn(0, 1 + i * step), 1 + i * ledgers / count);
        }
        long after = usedMemory();
        hidden.trim(ledgers + 1L);
        return (after - before) + " " + (usedMemory() - before);
    }

    /** The bytes of all objects that are in use. */
    private static long usedMemory() {
        System.gc();
        return ManagementFactory.getMemoryPoolMXBeans().stream().map(MemoryPoolMXBean::getCollectionUsage)
                .filter(Objects::nonNull).mapToLong(MemoryUsage::getUsed).sum();
    }

    private String read(String incarnation) {
        try {
            found = snapshot.read(incarnation);
        } catch (Snapshot.Refused error) {
            return (error.newer ? "newer " : "damaged ") + error.getMessage();
        }
        if (found.kind() != Snapshot.Kind.STATE) {
            return found.kind().toString();
        }
        rules = found.rules();
        return "STATE " + shown(found.applied()) + " " + found.origin() + " " + found.following() + " "
                + shown(rules.bound()) + " " + rules.damaged();
    }

    /** resume UNUSED APPLIED ORIGIN FOLLOWING LEDGER..., with - for the places of the snapshot that was read. */
    private String resume(String[] words) {
        TreeSet<Long> ledgers = new TreeSet<>();
        for (int i = 7; i < words.length; i++) {
            ledgers.add(Long.parseLong(words[i]));
        }
        try {
            Snapshot.Found given = new Snapshot.Found(Snapshot.Kind.STATE, null, place(words, 2),
                    Long.parseLong(words[5]), Long.parseLong(words[6]));
            Snapshot.Resume resume = Snapshot.resume(given, ledgers, words[1].equals("1"));
            return (resume.anew() ? "anew " : "snapshot ") + shown(resume.after());
        } catch (Snapshot.Refused error) {
            return "refused";
        }
    }

    private static Place place(String[] words, int at) {
        return new Place(Long.parseLong(words[at]), Long.parseLong(words[at + 1]), Integer.parseInt(words[at + 2]));
    }

    private static String shown(Place place) {
        return place.ledger() + "," + place.entry() + "," + place.batch();
    }

    private static ByteBuffer value(String word) {
        return word.equals("-") ? null : ByteBuffer.wrap(bytes(word));
    }

    private static Map<String, String> properties(String[] words, int from) {
        Map<String, String> properties = new HashMap<>();
        for (int i = from; i < words.length; i++) {
            String[] pair = words[i].split("\\.", -1);
            properties.put(text(pair[0]), text(pair[1]));
        }
        return properties;
    }

    private static byte[] bytes(String word) {
        return Base64.getUrlDecoder().decode(word.substring(1)); // after a letter, so that no word is empty
    }

    private static String word(byte[] content) {
        return "_" + Base64.getUrlEncoder().encodeToString(content);
    }

    private static String text(String word) {
        return new String(bytes(word), StandardCharsets.UTF_8);
    }

    /** It overrides methods, and has others that its super class does not know. */
    private static class Lacking extends java.io.StringReader {
        Lacking() {
            super("");
        }

        @Override
        public void close() {
            super.close();
        }

        @Override
        public String toString() {
            return "";
        }

        @Override
        public int read(char[] into) {
            return 0;
        }

        public void close(boolean really) { }

        protected void gone() { }

        void own() { }

        private void hidden() { }
    }
}
