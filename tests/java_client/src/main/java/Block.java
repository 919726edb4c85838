import com.google.protobuf.ByteString;
import java.io.ByteArrayOutputStream;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.zip.CRC32C;

/** Blocks of messages: docs/wire.md describes them. This writes and reads what the client needs. */
final class Block {
  private static final int HEADER = 64, KEY_OFFSETS = 3, KEYS = 4, VALUE_OFFSETS = 6, LABELS = 8, NUMBERS = 9;
  private final List<byte[]> sections = new ArrayList<>();
  private final List<Integer> tags = new ArrayList<>();

  /** A block of messages of a transaction: keys, values, and the properties that name the transaction. */
  static ByteString of(List<String> keys, List<String> values, String txn, long firstSeq) {
    Block block = new Block();
    int count = values.size();
    block.add(KEY_OFFSETS, offsets(keys));
    block.add(KEYS, text(String.join("", keys)));
    block.add(VALUE_OFFSETS, offsets(values));
    block.add(LABELS, label("tb.v", "1", count));
    block.add(LABELS, label("tb.txn", txn, count));
    ByteBuffer seqs = buffer(8 + 8 * count + 6).putInt(6).putInt(0);
    for (int row = 0; row < count; row++) seqs.putLong(firstSeq + row);
    block.add(NUMBERS, seqs.put(text("tb.seq")).array());
    return block.encoded(count, text(String.join("", values)));
  }

  private void add(int tag, byte[] content) {
    tags.add(tag);
    sections.add(content);
  }

  private ByteString encoded(int count, byte[] values) {
    ByteArrayOutputStream part = new ByteArrayOutputStream();
    for (int index = 0; index < tags.size(); index++) {
      part.writeBytes(buffer(8).putShort(tags.get(index).shortValue()).putShort((short) 0)
          .putInt(sections.get(index).length).array());
    }
    sections.forEach(section -> part.writeBytes(padded(section)));
    byte[] keysPart = part.toByteArray();
    ByteBuffer header = buffer(HEADER).put(text("TXBK")).put((byte) 1).put((byte) 0).putShort((short) tags.size())
        .putInt(count).putInt(count).putLong(0).putLong(0).putInt(keysPart.length).putInt(values.length)
        .putInt(keysPart.length).putInt(values.length).putInt(checksum(keysPart, keysPart.length))
        .putInt(checksum(values, values.length)).putInt(0);
    header.putInt(checksum(header.array(), 60));
    ByteArrayOutputStream all = new ByteArrayOutputStream();
    all.writeBytes(header.array());
    all.writeBytes(keysPart);
    all.writeBytes(padded(values));
    return ByteString.copyFrom(all.toByteArray());
  }

  /** The keys and values of a block, as `key=value`. */
  static List<String> read(ByteString data) {
    ByteBuffer block = ByteBuffer.wrap(data.toByteArray()).order(ByteOrder.LITTLE_ENDIAN);
    if (block.getInt(60) != checksum(block.array(), 60)) throw new IllegalArgumentException("a damaged block");
    int count = block.getInt(8), keysSize = block.getInt(32);
    Map<Integer, Integer> where = new HashMap<>();
    int at = HEADER + 8 * block.getShort(6);
    for (int index = 0; index < block.getShort(6); index++) {
      where.putIfAbsent((int) block.getShort(HEADER + 8 * index), at);
      at += (block.getInt(HEADER + 8 * index + 4) + 7) / 8 * 8;
    }
    List<String> found = new ArrayList<>();
    int values = HEADER + (keysSize + 7) / 8 * 8;
    for (int row = 0; row < count; row++) {
      found.add(item(block, where.get(KEY_OFFSETS), where.get(KEYS), row) + "="
          + item(block, where.get(VALUE_OFFSETS), values, row));
    }
    return found;
  }

  private static String item(ByteBuffer block, int offsets, int bytes, int row) {
    int start = block.getInt(offsets + 4 * row), end = block.getInt(offsets + 4 * row + 4);
    return new String(block.array(), bytes + start, end - start, StandardCharsets.UTF_8);
  }

  private static byte[] offsets(List<String> texts) {
    ByteBuffer offsets = buffer(4 * texts.size() + 4).putInt(0);
    int end = 0;
    for (String one : texts) offsets.putInt(end += text(one).length);
    return offsets.array();
  }

  private static byte[] label(String name, String value, int count) {
    ByteBuffer section = buffer(12 + 4 * count + text(name).length + text(value).length);
    section.putInt(text(name).length).putInt(1).putInt(text(value).length);
    for (int row = 0; row < count; row++) section.putInt(0);
    return section.put(text(name)).put(text(value)).array();
  }

  private static byte[] padded(byte[] content) {
    return java.util.Arrays.copyOf(content, (content.length + 7) / 8 * 8);
  }

  private static int checksum(byte[] content, int length) {
    CRC32C checksum = new CRC32C();
    checksum.update(content, 0, length);
    return (int) checksum.getValue();
  }

  private static byte[] text(String text) {
    return text.getBytes(StandardCharsets.UTF_8);
  }

  private static ByteBuffer buffer(int size) {
    return ByteBuffer.allocate(size).order(ByteOrder.LITTLE_ENDIAN);
  }
}
