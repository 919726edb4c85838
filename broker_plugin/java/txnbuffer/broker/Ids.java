package txnbuffer.broker;

import java.io.ByteArrayInputStream;
import java.io.DataInputStream;
import java.io.IOException;
import java.util.Iterator;
import java.util.Map;
import java.util.TreeMap;
import org.roaringbitmap.RoaringBitmap;

/** A set of numbers from 0 to 2^63 - 1: a few bits for each where they are dense. */
final class Ids {
    private final TreeMap<Long, RoaringBitmap> bitmaps = new TreeMap<>(); // by the high 32 bits; none is empty

    void add(long id) {
        bitmaps.computeIfAbsent(id >>> 32, high -> new RoaringBitmap()).add((int) id);
    }

    boolean contains(long id) {
        RoaringBitmap bitmap = bitmaps.get(id >>> 32);
        return bitmap != null && bitmap.contains((int) id);
    }

    void removeUpTo(long last) {
        bitmaps.headMap(last >>> 32).clear();
        RoaringBitmap bitmap = bitmaps.get(last >>> 32);
        if (bitmap != null) {
            bitmap.remove(0L, (last & 0xFFFF_FFFFL) + 1);
            if (bitmap.isEmpty()) {
                bitmaps.remove(last >>> 32);
            }
        }
    }

    void removeAll(Ids others) {
        Iterator<Map.Entry<Long, RoaringBitmap>> all = bitmaps.entrySet().iterator();
        while (all.hasNext()) {
            Map.Entry<Long, RoaringBitmap> one = all.next();
            RoaringBitmap removed = others.bitmaps.get(one.getKey());
            if (removed != null) {
                one.getValue().andNot(removed);
                if (one.getValue().isEmpty()) {
                    all.remove();
                }
            }
        }
    }

    /** Give back memory that was reserved for more numbers. */
    void compact() {
        bitmaps.values().forEach(bitmap -> {
            bitmap.runOptimize();
            bitmap.trim();
        });
    }

    boolean isEmpty() {
        return bitmaps.isEmpty();
    }

    /** Add the numbers of a bitmap in Roaring's portable 64-bit form. */
    void addPortable(byte[] stored) throws IOException {
        DataInputStream in = new DataInputStream(new ByteArrayInputStream(stored));
        for (long count = Long.reverseBytes(in.readLong()); count > 0; count--) {
            long high = Integer.reverseBytes(in.readInt()) & 0xFFFF_FFFFL;
            RoaringBitmap bitmap = new RoaringBitmap();
            bitmap.deserialize(in);
            if (!bitmap.isEmpty()) {
                bitmaps.merge(high, bitmap, (mine, other) -> RoaringBitmap.or(mine, other));
            }
        }
        if (in.available() > 0) {
            throw new IOException("bytes follow the bitmap");
        }
    }
}
