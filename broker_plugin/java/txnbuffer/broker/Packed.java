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
import txnbuffer.broker.Rules.Txn;

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
    /** The messages of an entry, those of a record set one by one, and how many of them are visible. */
    static final class Count implements Visitor {
        private final Rules rules;
        int all;
        int visible;

        Count(Rules rules) {
            this.rules = rules;
        }

        boolean partial() {
            return visible > 0 && visible < all;
        }

        @Override
        public void record(Place place, Txn txn, long seq) {
            all++;
            visible += rules.isHidden(place, txn) ? 0 : 1;
        }

        @Override
        public void message(Place place, Map<String, String> properties, ByteBuffer value) {
            int rows = Rules.rows(place, properties);
            all += rows;
            visible += rows - rules.hiddenRows(place, properties);
        }
    }

    private Packed() {
    }

    static boolean isBatch(MessageMetadata metadata) {
        return metadata.hasNumMessagesInBatch() && metadata.getEncryptionKeysCount() == 0 && !metadata.hasChunkId();
    }

    /** Visit all messages of an entry, whose reader index stays where it is. */
    static void visit(Position at, ByteBuf entry, Visitor visitor) throws IOException {
        ByteBuf data = entry.duplicate();
        MessageMetadata metadata = Commands.parseMessageMetadata(data);
        Map<String, String> properties = isBatch(metadata) ? Map.of() : properties(metadata.getPropertiesList());
        boolean marker = properties.containsKey("tb.marker") && metadata.getEncryptionKeysCount() == 0;
        if (!isBatch(metadata) && !marker) {
            visitor.message(place(at, -1), properties, null);
            return;
        }
        ByteBuf payload = codec(metadata).decode(data, metadata.getUncompressedSize());
        try {
            if (marker) {
                visitor.message(place(at, -1), properties, payload.nioBuffer());
            } else {
                visit(at, payload, metadata.getNumMessagesInBatch(), visitor);
            }
        } finally {
            payload.release();
        }
    }

    /** Visit the messages of a batch; the reader index is behind a message when it is visited. */
    private static void visit(Position at, ByteBuf payload, int count, Visitor visitor) throws IOException {
        Scanner scanner = new Scanner();
        SingleMessageMetadata single = new SingleMessageMetadata();
        for (int i = 0; i < count; i++) {
            Place place = place(at, i);
            switch (scanner.read(payload)) {
                case RECORD -> visitor.record(place, scanner.txn(), scanner.seq());
                case ORDINARY -> visitor.message(place, Map.of(), null);
                default -> {
                    ByteBuf value = Commands.deSerializeSingleMessageInBatch(payload, single, i, count);
                    try {
                        Map<String, String> properties = properties(single.getPropertiesList());
                        boolean marker = properties.containsKey("tb.marker");
                        visitor.message(place, properties, marker ? value.nioBuffer() : null);
                    } finally {
                        value.release();
                    }
                }
            }
        }
    }

    static Count count(Position at, ByteBuf entry, Rules rules) throws IOException {
        Count found = new Count(rules);
        visit(at, entry, found);
        return found;
    }

    /** An entry with what is visible of it; `metadata`, that of the entry, is changed. */
    static ByteBuf rewrite(Position at, ByteBuf entry, MessageMetadata metadata, Rules rules) throws IOException {
        ByteBuf data = entry.duplicate(); // which may have other indexes
        int start = data.readerIndex();
        Commands.skipBrokerEntryMetadataIfExist(data);
        ByteBuf head = data.slice(start, data.readerIndex() - start);
        Commands.skipMessageMetadata(data);
        if (metadata.getEncryptionKeysCount() > 0 || metadata.hasChunkId()) {
            throw new IOException("some records of an encrypted record set, or of one in chunks, are hidden");
        }
        ByteBuf body = repacked(data, metadata, (payload, packed) -> {
            if (isBatch(metadata)) {
                keepMessages(at, payload, packed, metadata, rules);
            } else {
                keepRows(at, payload, packed, metadata, rules);
            }
            return true;
        });
        return head.isReadable() ? Unpooled.wrappedBuffer(head.copy(), body) : body;
    }

    /** Writes another payload; false if that is the same. */
    interface Change {
        boolean write(ByteBuf payload, ByteBuf changed) throws IOException;
    }

    /** A message or batch with another payload, packed as before; null if that is the same. */
    static ByteBuf repacked(ByteBuf data, MessageMetadata metadata, Change change) throws IOException {
        CompressionCodec codec = codec(metadata);
        ByteBuf payload = codec.decode(data, metadata.getUncompressedSize());
        ByteBuf packed = PulsarByteBufAllocator.DEFAULT.buffer(payload.readableBytes());
        ByteBuf compressed = null;
        try {
            if (!change.write(payload, packed)) {
                return null;
            }
            compressed = codec.encode(packed);
            metadata.setUncompressedSize(packed.readableBytes());
            return Commands.serializeMetadataAndPayload(Commands.ChecksumType.Crc32c, metadata, compressed);
        } finally {
            payload.release();
            packed.release();
            if (compressed != null) {
                compressed.release();
            }
        }
    }

    private static void keepMessages(Position at, ByteBuf payload, ByteBuf packed, MessageMetadata metadata, Rules rules)
            throws IOException {
        Count count = new Count(rules);
        visit(at, payload, metadata.getNumMessagesInBatch(), new Visitor() {
            private int start = payload.readerIndex();

            @Override
            public void record(Place place, Txn txn, long seq) {
                int before = count.visible;
                count.record(place, txn, seq);
                keep(count.visible > before);
            }

            @Override
            public void message(Place place, Map<String, String> properties, ByteBuffer value) {
                int before = count.visible;
                count.message(place, properties, value);
                keep(count.visible > before);
            }

            private void keep(boolean visible) {
                if (visible) {
                    packed.writeBytes(payload, start, payload.readerIndex() - start);
                }
                start = payload.readerIndex();
            }
        });
        metadata.setNumMessagesInBatch(count.visible);
    }

    private static void keepRows(Position at, ByteBuf payload, ByteBuf packed, MessageMetadata metadata, Rules rules)
            throws IOException {
        Map<String, String> properties = properties(metadata.getPropertiesList());
        int hidden = rules.hiddenRows(place(at, -1), properties);
        packed.writeBytes(RecordSet.withoutFirst(hidden, Rules.rows(place(at, -1), properties), payload));
        Map<String, String> changed = Rules.without(hidden, properties);
        metadata.getPropertiesList().forEach(pair -> pair.setValue(changed.getOrDefault(pair.getKey(), pair.getValue())));
    }

    static CompressionCodec codec(MessageMetadata metadata) {
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
