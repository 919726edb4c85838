package txnbuffer.broker;

import java.util.ArrayDeque;
import java.util.HashSet;
import java.util.Set;
import java.util.TreeMap;
import java.util.function.Predicate;
import txnbuffer.broker.Rules.Place;
import txnbuffer.broker.Rules.Txn;

/**
 * Remembers which entries are visible as a whole, so that their messages are not looked at again for each subscription.
 * An entry that is not remembered may be visible too: its messages say it. One thread adds while others ask.
 */
final class VisibleEntries {
    private static final int MOST_UNDECIDED = 10_000;

    private record Undecided(Place entry, Set<Txn> txns) { }

    private final ArrayDeque<Undecided> undecided = new ArrayDeque<>();
    private final TreeMap<Long, Ids> visible = new TreeMap<>(); // the numbers of entries by ledger

    // The entry whose messages are being passed
    private Set<Txn> txns = new HashSet<>();
    private Txn last;
    private boolean any;
    private boolean hidden;

    void message(boolean applied) {
        any = true;
        hidden |= !applied; // it was not looked at
    }

    /** A message is hidden whatever commits. */
    void hide() {
        hidden = true;
    }

    void record(Txn txn) {
        if (txn != last) {
            txns.add(txn);
            last = txn;
        }
    }

    /** The entry ends: it is visible if all its transactions commit. */
    void entry(Place at) {
        if (any && !hidden && undecided.size() < MOST_UNDECIDED) {
            undecided.add(new Undecided(at, txns.isEmpty() ? Set.of() : txns));
            txns = txns.isEmpty() ? txns : new HashSet<>();
        } else {
            txns.clear();
        }
        last = null;
        any = false;
        hidden = false;
    }

    /** All entries up to one are decided. */
    synchronized void decide(Place end, Predicate<Txn> isAborted) {
        while (!undecided.isEmpty() && undecided.peek().entry.compareTo(end) <= 0) {
            Undecided next = undecided.remove();
            if (next.txns.stream().noneMatch(isAborted)) {
                add(next.entry);
            }
        }
    }

    private void add(Place entry) {
        if (!visible.containsKey(entry.ledger())) {
            if (!visible.isEmpty()) {
                visible.lastEntry().getValue().compact();
            }
            visible.put(entry.ledger(), new Ids());
        }
        visible.get(entry.ledger()).add(entry.entry());
    }

    synchronized boolean contains(long ledger, long entry) {
        Ids entries = visible.get(ledger);
        return entries != null && entries.contains(entry);
    }

    synchronized void trim(long firstLedger) {
        visible.headMap(firstLedger).clear();
    }
}
