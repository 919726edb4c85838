package txnbuffer.broker;

import java.util.Arrays;
import java.util.HashMap;
import java.util.Map;
import java.util.TreeMap;
import txnbuffer.broker.Rules.Place;
import txnbuffer.broker.Rules.Txn;

/**
 * The aborted transactions and the suppressed messages of a topic. One thread adds to them while others ask.
 *
 * <p>An aborted transaction is needed as long as the ledger of its marker exists: its records are before that. So the
 * ids are there twice, by coordinator to be looked up, and by the ledger of the marker to be forgotten with it.
 */
final class Hidden {
    private static final long ROWS = 1L << 32;

    /** Disjoint ascending ranges of one ledger, two numbers each: the first and the last place. */
    private static final class Ranges {
        long[] ends = new long[2];
        int count;

        void add(long first, long last) {
            if (count == ends.length) {
                ends = Arrays.copyOf(ends, count + Math.max(4, count / 2 & ~1));
            }
            ends[count++] = first;
            ends[count++] = last;
        }

        /** The index of the first number at or above a place, even: at or before a first place. */
        int search(long place) {
            int low = 0;
            int high = count;
            while (low < high) {
                int middle = (low + high) >>> 1;
                if (ends[middle] < place) {
                    low = middle + 1;
                } else {
                    high = middle;
                }
            }
            return low & ~1;
        }
    }

    private final Map<Long, Ids> aborted = new HashMap<>();
    private final TreeMap<Long, Map<Long, Ids>> abortedIn = new TreeMap<>();
    private final TreeMap<Long, Ranges> suppressed = new TreeMap<>();
    private long firstLedger;

    private static long number(Place place) {
        if (place.entry() >= ROWS / 2) {
            throw new IllegalArgumentException("a ledger of so many entries is not supported: " + place);
        }
        return place.entry() * ROWS + place.batch() + 1;
    }

    synchronized void abort(Txn txn, long markerLedger) {
        if (markerLedger < firstLedger) {
            return;
        }
        if (!abortedIn.containsKey(markerLedger)) {
            if (!abortedIn.isEmpty()) {
                abortedIn.lastEntry().getValue().values().forEach(Ids::compact);
            }
            abortedIn.put(markerLedger, new HashMap<>());
        }
        aborted.computeIfAbsent(txn.most(), most -> new Ids()).add(txn.least());
        abortedIn.get(markerLedger).computeIfAbsent(txn.most(), most -> new Ids()).add(txn.least());
    }

    synchronized boolean isAborted(Txn txn) {
        Ids ids = aborted.get(txn.most());
        return ids != null && ids.contains(txn.least());
    }

    /** Add places above all others; if the newest range ends with `before`, the message before them, extend it. */
    synchronized void suppress(Place first, Place last, Place before) {
        if (first.ledger() < firstLedger) {
            return;
        }
        Ranges ranges = suppressed.computeIfAbsent(first.ledger(), ledger -> new Ranges());
        boolean follows = before.ledger() == first.ledger() && ranges.count > 0
                && ranges.ends[ranges.count - 1] == number(before);
        if (follows) {
            ranges.ends[ranges.count - 1] = number(last);
        } else {
            ranges.add(number(first), number(last));
        }
    }

    /** How many of `rows` rows from a place on are suppressed; all, if those are not the first ones. */
    synchronized int suppressed(Place first, int rows) {
        Ranges ranges = suppressed.get(first.ledger());
        if (ranges == null) {
            return 0;
        }
        long low = number(first);
        int at = ranges.search(low);
        if (at == ranges.count || ranges.ends[at] > low + rows - 1) {
            return 0;
        }
        long count = Math.min(ranges.ends[at + 1], low + rows - 1) - low + 1;
        boolean onlyFirst = ranges.ends[at] <= low
                && (at + 2 == ranges.count || ranges.ends[at + 2] > low + rows - 1);
        return onlyFirst ? (int) count : rows;
    }

    synchronized void trim(long first) {
        firstLedger = Math.max(firstLedger, first);
        suppressed.headMap(firstLedger).clear();
        Map<Long, Map<Long, Ids>> gone = abortedIn.headMap(firstLedger);
        gone.values().forEach(byCoordinator -> byCoordinator.forEach((most, ids) -> {
            aborted.get(most).removeAll(ids);
            if (aborted.get(most).isEmpty()) {
                aborted.remove(most);
            }
        }));
        gone.clear();
    }
}
