package txnbuffer.broker;

import io.netty.buffer.ByteBuf;
import io.netty.buffer.Unpooled;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.bookkeeper.mledger.Position;
import org.apache.pulsar.common.allocator.PulsarByteBufAllocator;
import org.apache.pulsar.common.api.proto.KeyValue;
import org.apache.pulsar.common.api.proto.MessageMetadata;
import org.apache.pulsar.common.api.proto.SingleMessageMetadata;
import org.apache.pulsar.common.compression.CompressionCodec;
import org.apache.pulsar.common.compression.CompressionCodecProvider;
import org.apache.pulsar.common.protocol.Commands;
import txnbuffer.broker.Rules.Place;

/**
 * The messages of an entry: one, or a batch, which may be compressed.
 *
 * <p>What is stored in clear counts. The messages of an encrypted batch cannot be read, and so are ordinary ones: the
 * client library encrypts nothing. Each chunk of a message counts by the properties of that message.
 *
 * <p>A rewritten batch has the messages that are visible, in their order, and nothing else of it changes. Cursors store
 * acknowledged messages by their place in it, so this is a format: another version must leave out the same messages.
 * Its messages have the places 0, 1, 2 ... in their order, and it is packed as before: with the same compression, and
 * with the data of the broker before it. A record set of which some rows are hidden is rewritten as a record set of the
 * others, {@code tb.records} and {@code tb.seq} are theirs; it stays one message.
 */
final class Packed {
    /** Is given each message; `value` is that of a marker, else null. */
    interface Visitor {
        void message(Place place, Map<String, String> properties, ByteBuffer value);
    }

    /** How many rows of a message are hidden, the first ones. */
    interface Hidden {
        int rows(Place place, Map<String, String> properties);
    }

    /** The messages of an entry, those of a record set one by one, and how many of them are visible. */
    record Count(int all, int visible) {
        boolean partial() {
            return visible > 0 && visible < all;
        }
    }

    private Packed() {
    }

    private static boolean isBatch(MessageMetadata metadata) {
        return metadata.hasNumMessagesInBatch() && metadata.getEncryptionKeysCount() == 0 && !metadata.hasChunkId();
    }

    /** Visit all messages of an entry, whose reader index stays where it is. */
    static void visit(Position at, ByteBuf entry, Visitor visitor) throws IOException {
        ByteBuf data = entry.duplicate();
        MessageMetadata metadata = Commands.parseMessageMetadata(data);
        if (!isBatch(metadata)) {
            Map<String, String> properties = properties(metadata.getPropertiesList());
            if (!properties.containsKey("tb.marker") || metadata.getEncryptionKeysCount() > 0) {
                visitor.message(place(at, -1), properties, null);
                return;
            }
            ByteBuf value = codec(metadata).decode(data, metadata.getUncompressedSize());
            try {
                visitor.message(place(at, -1), properties, value.nioBuffer());
            } finally {
                value.release();
            }
            return;
        }
        ByteBuf payload = codec(metadata).decode(data, metadata.getUncompressedSize());
        try {
            SingleMessageMetadata single = new SingleMessageMetadata();
            for (int i = 0, n = metadata.getNumMessagesInBatch(); i < n; i++) {
                ByteBuf value = Commands.deSerializeSingleMessageInBatch(payload, single, i, n);
                try {
                    Map<String, String> properties = properties(single.getPropertiesList());
                    boolean marker = properties.containsKey("tb.marker");
                    visitor.message(place(at, i), properties, marker ? value.nioBuffer() : null);
                } finally {
                    value.release();
                }
            }
        } finally {
            payload.release();
        }
    }

    static Count count(Position at, ByteBuf entry, Hidden hidden) throws IOException {
        int[] counts = new int[2];
        visit(at, entry, (place, properties, value) -> {
            int rows = Rules.rows(place, properties);
            counts[0] += rows;
            counts[1] += rows - hidden.rows(place, properties);
        });
        return new Count(counts[0], counts[1]);
    }

    /** An entry with what is visible of it; `metadata`, that of the entry, is changed. */
    static ByteBuf rewrite(Position at, ByteBuf entry, MessageMetadata metadata, Hidden hidden) throws IOException {
        ByteBuf data = entry.duplicate(); // which may have other indexes
        int start = data.readerIndex();
        Commands.skipBrokerEntryMetadataIfExist(data);
        ByteBuf head = data.slice(start, data.readerIndex() - start);
        Commands.skipMessageMetadata(data);
        if (metadata.getEncryptionKeysCount() > 0 || metadata.hasChunkId()) {
            throw new IOException("some records of an encrypted record set, or of one in chunks, are hidden");
        }
        CompressionCodec codec = codec(metadata);
        ByteBuf payload = codec.decode(data, metadata.getUncompressedSize());
        ByteBuf packed = PulsarByteBufAllocator.DEFAULT.buffer(payload.readableBytes());
        ByteBuf compressed = null;
        try {
            if (isBatch(metadata)) {
                keepMessages(at, payload, packed, metadata, hidden);
            } else {
                keepRows(at, payload, packed, metadata, hidden);
            }
            compressed = codec.encode(packed);
            metadata.setUncompressedSize(packed.readableBytes());
            ByteBuf body = Commands.serializeMetadataAndPayload(Commands.ChecksumType.Crc32c, metadata, compressed);
            return head.isReadable() ? Unpooled.wrappedBuffer(head.copy(), body) : body;
        } finally {
            payload.release();
            packed.release();
            if (compressed != null) {
                compressed.release();
            }
        }
    }

    private static void keepMessages(Position at, ByteBuf payload, ByteBuf packed, MessageMetadata metadata,
            Hidden hidden) throws IOException {
        SingleMessageMetadata single = new SingleMessageMetadata();
        int visible = 0;
        for (int i = 0, n = metadata.getNumMessagesInBatch(); i < n; i++) {
            ByteBuf value = Commands.deSerializeSingleMessageInBatch(payload, single, i, n);
            try {
                if (hidden.rows(place(at, i), properties(single.getPropertiesList())) == 0) {
                    visible++;
                    Commands.serializeSingleMessageInBatchWithPayload(single, value, packed);
                }
            } finally {
                value.release();
            }
        }
        metadata.setNumMessagesInBatch(visible);
    }

    private static void keepRows(Position at, ByteBuf payload, ByteBuf packed, MessageMetadata metadata, Hidden hidden)
            throws IOException {
        Map<String, String> properties = properties(metadata.getPropertiesList());
        int rows = hidden.rows(place(at, -1), properties);
        packed.writeBytes(RecordSet.withoutFirst(rows, Rules.rows(place(at, -1), properties), payload));
        Map<String, String> changed = Rules.without(rows, properties);
        metadata.getPropertiesList().forEach(pair -> pair.setValue(changed.getOrDefault(pair.getKey(), pair.getValue())));
    }

    private static CompressionCodec codec(MessageMetadata metadata) {
        return CompressionCodecProvider.getCompressionCodec(metadata.getCompression());
    }

    static Place place(Position at, int batch) {
        return new Place(at.getLedgerId(), at.getEntryId(), batch);
    }

    /** Those of the protocol. */
    private static Map<String, String> properties(List<KeyValue> list) {
        Map<String, String> found = Map.of();
        for (KeyValue pair : list) {
            if (Rules.reserved(pair.getKey())) {
                found = found.isEmpty() ? new HashMap<>() : found;
                found.put(pair.getKey(), pair.getValue());
            }
        }
        return found;
    }
}
