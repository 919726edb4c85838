package txnbuffer.broker;

import io.netty.buffer.ByteBuf;
import java.io.IOException;
import java.util.List;
import java.util.Set;
import org.apache.pulsar.broker.service.Producer;
import org.apache.pulsar.common.api.proto.KeyValue;
import org.apache.pulsar.common.api.proto.MessageMetadata;
import org.apache.pulsar.common.api.proto.SingleMessageMetadata;
import org.apache.pulsar.common.protocol.Commands;

/**
 * Copies of transactional records that another program sends to a topic with transactions.
 *
 * <p>Dead-letter and retry producers of Pulsar's clients copy all properties of a message, and so does whoever sends dead
 * letters back. With those of a transaction the copy would be a late record, or one of a transaction that nobody ends.
 * So it is stored without them, as an ordinary record; all readers agree on that.
 *
 * <p>A copy is a message with a property that those producers add. What the client library sends is not looked at: it
 * says who it is in the properties of its producers.
 */
final class Copies {
    private static final String OURS = "txnbuffer"; // as in broker_io/pulsar/writer.py
    private static final Set<String> ADDED = Set.of("ORIGIN_MESSAGE_ID", "REAL_TOPIC");
    private static final Set<String> COPIED = Set.of("tb.txn", "tb.seq");

    private Copies() {
    }

    static boolean mayBeSentBy(Producer producer) {
        return producer != null && !producer.getMetadata().containsKey(OURS);
    }

    /** An entry whose copies have no properties of a transaction; null if it has none that can be read. */
    static ByteBuf asOrdinary(ByteBuf entry) {
        try {
            ByteBuf data = entry.duplicate();
            MessageMetadata metadata = Commands.parseMessageMetadata(data);
            return Packed.isBatch(metadata) ? batch(data, metadata) : message(data, metadata);
        } catch (IOException | RuntimeException unreadable) {
            return null; // the rules say what becomes of it
        }
    }

    private static ByteBuf message(ByteBuf payload, MessageMetadata metadata) {
        if (!isCopy(metadata.getPropertiesList())) {
            return null;
        }
        MessageMetadata changed = new MessageMetadata().copyFrom(metadata).clearProperties();
        metadata.getPropertiesList().stream().filter(Copies::stays)
                .forEach(pair -> changed.addProperty().copyFrom(pair));
        return Commands.serializeMetadataAndPayload(Commands.ChecksumType.Crc32c, changed, payload);
    }

    private static ByteBuf batch(ByteBuf data, MessageMetadata metadata) throws IOException {
        int count = metadata.getNumMessagesInBatch();
        return Packed.repacked(data, metadata, (payload, changed) ->
                !areOrdinary(payload.duplicate(), count) && copiesAsOrdinary(payload, changed, count));
    }

    /** False if there is no copy. */
    private static boolean copiesAsOrdinary(ByteBuf payload, ByteBuf changed, int count) throws IOException {
        boolean found = false;
        SingleMessageMetadata single = new SingleMessageMetadata();
        for (int i = 0; i < count; i++) {
            ByteBuf value = Commands.deSerializeSingleMessageInBatch(payload, single, i, count);
            try {
                boolean copy = isCopy(single.getPropertiesList());
                found |= copy;
                Commands.serializeSingleMessageInBatchWithPayload(copy ? ordinary(single) : single, value, changed);
            } finally {
                value.release();
            }
        }
        return found;
    }

    private static SingleMessageMetadata ordinary(SingleMessageMetadata copy) {
        SingleMessageMetadata changed = new SingleMessageMetadata().copyFrom(copy).clearProperties();
        copy.getPropertiesList().stream().filter(Copies::stays).forEach(pair -> changed.addProperty().copyFrom(pair));
        return changed;
    }

    /** Whether none of these messages has a property of the protocol, which is quick to say. */
    private static boolean areOrdinary(ByteBuf payload, int count) {
        Scanner scanner = new Scanner();
        for (int i = 0; i < count; i++) {
            if (scanner.read(payload) != Scanner.Kind.ORDINARY) {
                return false;
            }
        }
        return true;
    }

    private static boolean isCopy(List<KeyValue> properties) {
        return properties.stream().anyMatch(pair -> !stays(pair))
                && properties.stream().anyMatch(pair -> ADDED.contains(pair.getKey()));
    }

    private static boolean stays(KeyValue property) {
        return !COPIED.contains(property.getKey());
    }
}
