package txnbuffer.broker;

import io.netty.buffer.ByteBuf;
import io.netty.buffer.ByteBufUtil;
import io.netty.buffer.Unpooled;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Arrays;
import java.util.BitSet;
import java.util.Objects;
import java.util.zip.CRC32C;
import org.apache.pulsar.common.api.proto.CompressionType;
import org.apache.pulsar.common.compression.CompressionCodec;
import org.apache.pulsar.common.compression.CompressionCodecProvider;

/**
 * The value of a record set without its first records, which is that of a record set again. txnbuffer/recordset.py has
 * the form of a record set, and broker_io/block.py that of the block which it is.
 *
 * <p>What readers of record sets ignore is left out: entry numbers, publish times, and sections that may be skipped.
 */
final class RecordSet {
    private static final byte[] MAGIC = {'T', 'X', 'B', 'K', 1}; // and version
    private static final int HEAD = 64;
    private static final int KEYS_ZSTD = 1, VALUES_ZSTD = 2;
    private static final int HASHES = 1, KEY_ABSENT = 2, KEY_OFFSETS = 3, KEYS = 4, VALUE_ABSENT = 5, VALUE_OFFSETS = 6,
            EVENT_TIMES = 7, LABELS = 8, NUMBERS = 9, ENTRIES = 10, PUBLISH_TIMES = 11;
    private static final int IGNORABLE = 1;
    private static final int MOST_BYTES = 64 * 1024 * 1024;

    private final ByteBuffer block;
    private final int rows;
    private final int hidden;
    private int keysStart = -1; // of the bytes of the first key that is left
    private int valuesStart = -1;

    private RecordSet(ByteBuffer block, int rows, int hidden) {
        this.block = block;
        this.rows = rows;
        this.hidden = hidden;
    }

    /** Leave out the first `hidden` of `rows` records. Raises IOException or RuntimeException for a damaged set. */
    static byte[] withoutFirst(int hidden, int rows, ByteBuf value) throws IOException {
        ByteBuffer block = ByteBuffer.wrap(ByteBufUtil.getBytes(value)).order(ByteOrder.LITTLE_ENDIAN);
        boolean known = block.limit() >= HEAD && Arrays.equals(Arrays.copyOf(block.array(), MAGIC.length), MAGIC)
                && checksum(Arrays.copyOf(block.array(), HEAD - 4)) == block.getInt(HEAD - 4)
                && (block.get(5) & ~(KEYS_ZSTD | VALUES_ZSTD)) == 0;
        if (!known || block.getInt(8) != rows || rows > MOST_BYTES / 4) { // an offset has 4 bytes
            throw new IOException("its value is not a block of version 1 with " + rows + " records");
        }
        return new RecordSet(block, rows, hidden).cut();
    }

    private byte[] cut() throws IOException {
        int flags = block.get(5);
        ByteBuffer keys = ByteBuffer.wrap(part(HEAD, 32, (flags & KEYS_ZSTD) != 0)).order(ByteOrder.LITTLE_ENDIAN);
        byte[] values = part(HEAD + padded(block.getInt(32)), 36, (flags & VALUES_ZSTD) != 0);
        int sections = 0, at = 8 * (block.getShort(6) & 0xFFFF);
        ByteArrayOutputStream table = new ByteArrayOutputStream(), contents = new ByteArrayOutputStream();
        for (int entry = 0, end = at; entry < end; entry += 8) {
            int tag = keys.getShort(entry), length = keys.getInt(entry + 4);
            byte[] left = section(tag, range(keys.array(), at, length));
            if (left != null) {
                sections++;
                table.write(numbers(8).putShort((short) tag).putShort((short) 0).putInt(left.length).array());
                contents.write(left);
                contents.write(new byte[padded(left.length) - left.length]);
            } else if (tag != ENTRIES && tag != PUBLISH_TIMES && (keys.getShort(entry + 2) & IGNORABLE) == 0) {
                throw new IOException("its value has a section " + tag + ", which this plug-in does not know");
            }
            at += padded(length);
        }
        contents.writeTo(table);
        return packed(sections, table.toByteArray(), without(values, 0, valuesStart));
    }

    /** A section without the first rows; null for one that is left out. */
    private byte[] section(int tag, byte[] content) throws IOException {
        ByteBuffer in = ByteBuffer.wrap(content).order(ByteOrder.LITTLE_ENDIAN);
        switch (tag) {
            case HASHES:
                return without(content, 0, 16 * hidden);
            case KEY_ABSENT:
            case VALUE_ABSENT:
                return bits(content);
            case KEY_OFFSETS:
                keysStart = in.getInt(4 * hidden);
                return offsets(in, keysStart);
            case KEYS:
                return without(content, 0, keysStart);
            case VALUE_OFFSETS:
                valuesStart = in.getInt(4 * hidden);
                return offsets(in, valuesStart);
            case EVENT_TIMES:
                return without(content, 0, 8 * hidden);
            case LABELS:
                return without(content, 8 + 4 * in.getInt(4), 4 * hidden);
            case NUMBERS:
                int bitmap = in.getInt(4) == 0 ? 0 : (rows + 7) / 8, end = 8 + 8 * rows;
                byte[] present = range(content, end, bitmap);
                return joined(range(content, 0, 8), range(content, 8 + 8 * hidden, 8 * (rows - hidden)),
                        bitmap == 0 ? present : bits(present), without(content, 0, end + bitmap));
            default:
                return null;
        }
    }

    private byte[] offsets(ByteBuffer in, int start) {
        ByteBuffer left = numbers(4 * (rows - hidden + 1));
        for (int row = hidden; row <= rows; row++) {
            left.putInt(in.getInt(4 * row) - start);
        }
        return left.array();
    }

    private byte[] bits(byte[] bitmap) {
        return Arrays.copyOf(BitSet.valueOf(bitmap).get(hidden, rows).toByteArray(), (rows - hidden + 7) / 8);
    }

    private static byte[] without(byte[] content, int at, int count) throws IOException {
        int end = Math.addExact(at, count);
        return joined(range(content, 0, at), range(content, end, content.length - end));
    }

    private static byte[] range(byte[] content, int at, int length) {
        Objects.checkFromIndexSize(at, length, content.length); // before so much is allocated
        return Arrays.copyOfRange(content, at, at + length);
    }

    private static byte[] joined(byte[]... parts) throws IOException {
        ByteArrayOutputStream all = new ByteArrayOutputStream();
        for (byte[] part : parts) {
            all.write(part);
        }
        return all.toByteArray();
    }

    /** A part of the block; the header has its stored size, its size and its checksum, 8 bytes apart. */
    private byte[] part(int at, int field, boolean compressed) throws IOException {
        byte[] stored = range(block.array(), at, block.getInt(field));
        int size = block.getInt(field + 8);
        if (checksum(stored) != block.getInt(field + 16) || size < 0 || size > MOST_BYTES) {
            throw new IOException("a part of its value is damaged");
        }
        byte[] raw = compressed ? bytes(zstd().decode(Unpooled.wrappedBuffer(stored), size)) : stored;
        if (raw.length != size) {
            throw new IOException("a part of its value has " + raw.length + " bytes instead of " + size);
        }
        return raw;
    }

    private byte[] packed(int sections, byte[] keys, byte[] values) throws IOException {
        int flags = block.get(5);
        byte[] storedKeys = (flags & KEYS_ZSTD) == 0 ? keys : bytes(zstd().encode(Unpooled.wrappedBuffer(keys)));
        byte[] storedValues = (flags & VALUES_ZSTD) == 0 ? values : bytes(zstd().encode(Unpooled.wrappedBuffer(values)));
        ByteBuffer head = numbers(HEAD).put(MAGIC).put((byte) flags).putShort((short) sections)
                .putInt(rows - hidden).putInt(rows - hidden).putLong(block.getLong(16)).putLong(block.getLong(24))
                .putInt(storedKeys.length).putInt(storedValues.length).putInt(keys.length).putInt(values.length)
                .putInt(checksum(storedKeys)).putInt(checksum(storedValues)).putInt(block.getInt(56));
        head.putInt(checksum(Arrays.copyOf(head.array(), HEAD - 4)));
        return joined(head.array(), Arrays.copyOf(storedKeys, padded(storedKeys.length)),
                Arrays.copyOf(storedValues, padded(storedValues.length)));
    }

    private static CompressionCodec zstd() {
        return CompressionCodecProvider.getCompressionCodec(CompressionType.ZSTD);
    }

    private static byte[] bytes(ByteBuf buffer) {
        try {
            return ByteBufUtil.getBytes(buffer);
        } finally {
            buffer.release();
        }
    }

    private static ByteBuffer numbers(int bytes) {
        return ByteBuffer.allocate(bytes).order(ByteOrder.LITTLE_ENDIAN);
    }

    private static int padded(int length) {
        return Math.addExact(length, 7) & ~7;
    }

    private static int checksum(byte[] content) {
        CRC32C sum = new CRC32C();
        sum.update(content);
        return (int) sum.getValue();
    }
}
