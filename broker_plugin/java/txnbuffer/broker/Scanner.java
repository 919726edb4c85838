package txnbuffer.broker;

import io.netty.buffer.ByteBuf;
import txnbuffer.broker.Rules.Txn;

/**
 * Reads the metadata of a message in a batch without making an object of each property: brokers spend most of what the
 * plug-in costs there. It knows ordinary messages and records as txnbuffer writes them; all else is OTHER, and read as
 * the broker does.
 *
 * <p>The metadata is a SingleMessageMetadata of Protobuf: field 1 is a property, with its name as field 1 and its text
 * as field 2, and field 3 the size of the value.
 */
final class Scanner {
    enum Kind { ORDINARY, RECORD, OTHER }

    private static final int PROPERTY = 1 << 3 | 2, NAME = 1 << 3 | 2, TEXT = 2 << 3 | 2, SIZE = 3 << 3;
    private static final int VERSION = 1, TXN = 2, SEQ = 4; // the bits of properties that were seen
    private static final int MOST_DIGITS = 18;
    private static final int NONE = -1;

    private byte[] bytes = new byte[256];
    private int at;
    private int end;
    private int seen;
    private int valueSize;
    private Txn txn = new Txn(0, 0);
    private long seq;

    /** Read the metadata of the message at the reader index, which moves behind the message unless it is OTHER. */
    Kind read(ByteBuf payload) {
        int start = payload.readerIndex();
        if (payload.readableBytes() < 4) {
            return Kind.OTHER;
        }
        int size = payload.getInt(start);
        if (size < 0 || size > payload.readableBytes() - 4) {
            return Kind.OTHER;
        }
        if (size > bytes.length) {
            bytes = new byte[2 * size];
        }
        payload.getBytes(start + 4, bytes, 0, size);
        at = 0;
        end = size;
        seen = 0;
        valueSize = NONE;
        if (!fields() || valueSize < 0 || valueSize > payload.readableBytes() - 4 - size
                || seen != 0 && seen != (VERSION | TXN | SEQ)) {
            return Kind.OTHER;
        }
        payload.readerIndex(start + 4 + size + valueSize);
        return seen == 0 ? Kind.ORDINARY : Kind.RECORD;
    }

    Txn txn() {
        return txn;
    }

    long seq() {
        return seq;
    }

    private boolean fields() {
        while (at < end) {
            int tag = number();
            if (tag == PROPERTY) {
                int size = number();
                if (size < 0 || size > end - at || !property(at + size)) {
                    return false;
                }
            } else if (tag == SIZE) {
                valueSize = number();
            } else if (tag < 0 || !skip(tag & 7)) {
                return false;
            }
        }
        return at == end;
    }

    private boolean skip(int type) {
        int size = switch (type) {
            case 0 -> 0;
            case 1 -> 8;
            case 2 -> number();
            case 5 -> 4;
            default -> NONE;
        };
        if (type == 0) {
            while (at < end && bytes[at] < 0) {
                at++;
            }
            size = 1;
        }
        if (size < 0 || size > end - at) {
            return false;
        }
        at += size;
        return true;
    }

    /** A number below 2^31, or NONE. */
    private int number() {
        int found = 0;
        for (int shift = 0; shift < 28 && at < end; shift += 7) {
            byte next = bytes[at++];
            found |= (next & 0x7F) << shift;
            if (next >= 0) {
                return found;
            }
        }
        return NONE;
    }

    /** Read a property up to a place; false if it is of the protocol, but not as in records that txnbuffer writes. */
    private boolean property(int stop) {
        if (number() != NAME) {
            return false;
        }
        int size = number(), name = at;
        if (size < 0 || size > stop - at) {
            return false;
        }
        at += size;
        if (number() != TEXT) {
            return false;
        }
        int length = number(), text = at;
        if (length < 0 || length != stop - at) {
            return false;
        }
        at = stop;
        if (size < 3 || bytes[name] != 't' || bytes[name + 1] != 'b' || bytes[name + 2] != '.') {
            return true;
        }
        if (size == 4 && bytes[name + 3] == 'v') {
            return first(VERSION) && length == 1 && bytes[text] == '1';
        }
        if (is(name, size, 't', 'x', 'n')) {
            return first(TXN) && id(text, stop);
        }
        if (is(name, size, 's', 'e', 'q')) {
            seq = digits(text, stop);
            return first(SEQ) && seq >= 1;
        }
        return false;
    }

    private boolean is(int name, int size, char first, char second, char third) {
        return size == 6 && bytes[name + 3] == first && bytes[name + 4] == second && bytes[name + 5] == third;
    }

    private boolean first(int property) {
        boolean found = (seen & property) == 0;
        seen |= property;
        return found;
    }

    private boolean id(int from, int stop) {
        int colon = from;
        while (colon < stop && bytes[colon] != ':') {
            colon++;
        }
        long most = digits(from, colon), least = digits(colon + 1, stop);
        if (most < 0 || least < 1) {
            return false;
        }
        if (most != txn.most() || least != txn.least()) {
            txn = new Txn(most, least);
        }
        return true;
    }

    private long digits(int from, int stop) {
        if (from >= stop || stop - from > MOST_DIGITS) {
            return NONE;
        }
        long found = 0;
        for (int place = from; place < stop; place++) {
            int digit = bytes[place] - '0';
            if (digit < 0 || digit > 9) {
                return NONE;
            }
            found = 10 * found + digit;
        }
        return found;
    }
}
