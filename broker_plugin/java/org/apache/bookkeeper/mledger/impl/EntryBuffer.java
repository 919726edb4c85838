package org.apache.bookkeeper.mledger.impl;

import io.netty.buffer.ByteBuf;
import org.apache.bookkeeper.mledger.Entry;
import org.apache.pulsar.broker.service.EntryAndMetadata;

/** In this package of BookKeeper because the buffer of an entry is visible only here. */
public final class EntryBuffer {
    private EntryBuffer() {
    }

    /** Give an entry that was read for one dispatcher another content; the buffer is released with the entry. */
    public static void replace(Entry entry, ByteBuf buffer) {
        Entry inner = entry instanceof EntryAndMetadata shared ? shared.unwrap() : entry;
        if (!(inner instanceof EntryImpl found)) {
            buffer.release();
            throw new IllegalStateException("an entry of the unknown class " + inner.getClass().getName());
        }
        found.onDeallocate(found.data::release); // the dispatcher still asks the old one for its size
        found.data = buffer;
    }
}
