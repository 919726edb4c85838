import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.transaction.Transaction;

/**
 * The peer of the Pulsar figures: Pulsar's own transactions, from its own Java client.
 *
 * <pre>
 * rate SERVICE_URL IN_FLIGHT WARM_UP_SECONDS SECONDS TOPIC...   transactions of one record to each topic, committed
 * abort SERVICE_URL IN_FLIGHT COUNT TOPIC                       so many transactions of one record, aborted
 * </pre>
 *
 * Prints the transactions a second of the measured time on the last line.
 */
public final class NativeTransactions {
    private final PulsarClient client;
    private final List<Producer<byte[]>> producers = new ArrayList<>();
    private final boolean commit;
    private final AtomicLong ended = new AtomicLong();
    private final AtomicReference<Throwable> failure = new AtomicReference<>();
    private final byte[] value = new byte[100];

    private NativeTransactions(PulsarClient client, boolean commit) {
        this.client = client;
        this.commit = commit;
    }

    public static void main(String[] arguments) throws Exception {
        boolean rate = arguments[0].equals("rate");
        int inFlight = Integer.parseInt(arguments[2]);
        double perSecond;
        PulsarClient client = PulsarClient.builder().serviceUrl(arguments[1]).enableTransaction(true).build();
        try {
            NativeTransactions driver = new NativeTransactions(client, rate);
            for (int i = rate ? 5 : 4; i < arguments.length; i++) {
                // A time-out would end transactions that wait their turn; all else is as the client has it.
                driver.producers.add(client.newProducer().topic(arguments[i]).sendTimeout(0, TimeUnit.SECONDS)
                        .blockIfQueueFull(true).create());
            }
            perSecond = rate
                    ? driver.runFor(inFlight, Integer.parseInt(arguments[3]), Integer.parseInt(arguments[4]))
                    : driver.runOften(inFlight, Long.parseLong(arguments[3]));
        } finally {
            client.close();
        }
        System.out.println(perSecond);
    }

    private double runFor(int inFlight, int warmUpSeconds, int seconds) throws Exception {
        Semaphore room = new Semaphore(inFlight);
        long warm = System.nanoTime() + TimeUnit.SECONDS.toNanos(warmUpSeconds);
        while (System.nanoTime() < warm) {
            beginOne(room);
        }
        long before = ended.get();
        long start = System.nanoTime();
        long end = start + TimeUnit.SECONDS.toNanos(seconds);
        while (System.nanoTime() < end) {
            beginOne(room);
        }
        double perSecond = (ended.get() - before) * 1e9 / (System.nanoTime() - start);
        finish(room, inFlight);
        return perSecond;
    }

    private double runOften(int inFlight, long count) throws Exception {
        Semaphore room = new Semaphore(inFlight);
        long start = System.nanoTime();
        for (long i = 0; i < count; i++) {
            beginOne(room);
        }
        finish(room, inFlight);
        return count * 1e9 / (System.nanoTime() - start);
    }

    private void beginOne(Semaphore room) throws Exception {
        room.acquire();
        check();
        client.newTransaction().withTransactionTimeout(10, TimeUnit.MINUTES).build()
                .thenCompose(this::writeAndEnd)
                .whenComplete((nothing, error) -> {
                    if (error != null) {
                        failure.compareAndSet(null, error);
                    } else {
                        ended.incrementAndGet();
                    }
                    room.release();
                });
    }

    private CompletableFuture<Void> writeAndEnd(Transaction transaction) {
        CompletableFuture<?>[] sends = producers.stream()
                .map(producer -> producer.newMessage(transaction).value(value).sendAsync())
                .toArray(CompletableFuture[]::new);
        return CompletableFuture.allOf(sends)
                .thenCompose(nothing -> commit ? transaction.commit() : transaction.abort());
    }

    private void finish(Semaphore room, int inFlight) throws Exception {
        room.acquire(inFlight);
        check();
    }

    private void check() throws Exception {
        if (failure.get() != null) {
            throw new Exception("a transaction failed", failure.get());
        }
    }
}
