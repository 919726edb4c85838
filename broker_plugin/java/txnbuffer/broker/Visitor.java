package txnbuffer.broker;

import java.nio.ByteBuffer;
import java.util.Map;
import txnbuffer.broker.Rules.Place;
import txnbuffer.broker.Rules.Txn;

/** Is given each message of an entry, in order. */
interface Visitor {
    /** A record as txnbuffer writes it: tb.v=1, the id, a number from 1 on, and no other property of the protocol. */
    void record(Place place, Txn txn, long seq);

    /** Any other message, or such a one; `value` is that of a marker, else null. */
    void message(Place place, Map<String, String> properties, ByteBuffer value);
}
