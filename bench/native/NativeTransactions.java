import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.Collections;
import java.util.Comparator;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.transaction.Transaction;

/**
 * The peer of the Pulsar figures: Pulsar's own transactions, from its own Java client.
 *
 * <pre>
 * rate SERVICE_URL IN_FLIGHT WARM_UP_SECONDS SECONDS TOPIC...   commit transactions of one record to each topic
 * abort SERVICE_URL IN_FLIGHT COUNT TOPIC                       abort COUNT transactions of one record
 * hold SERVICE_URL TOPIC                                        one transaction of one record at a time, on command
 * </pre>
 *
 * Prints the transactions per second on the last line. The command `hold` reads lines from the input: `open`, then
 * `commit` or `abort`, and prints each one when it is done.
 */
public final class NativeTransactions {
    /** A client with more pending requests to the coordinator deadlocks. */
    private static final int REQUESTS_OF_A_CLIENT = 1000;

    private record Side(PulsarClient client, List<Producer<byte[]>> producers, AtomicInteger open) {}

    private final List<Side> sides = new ArrayList<>();
    private final boolean commit;
    private final AtomicLong ended = new AtomicLong();
    private final AtomicReference<Throwable> failure = new AtomicReference<>();
    private final byte[] value = new byte[100];

    private NativeTransactions(boolean commit) {
        this.commit = commit;
    }

    public static void main(String[] arguments) throws Exception {
        if (arguments[0].equals("hold")) {
            hold(arguments[1], arguments[2]);
            return;
        }
        boolean rate = arguments[0].equals("rate");
        int inFlight = Integer.parseInt(arguments[2]);
        double perSecond;
        NativeTransactions driver = new NativeTransactions(rate);
        try {
            List<String> topics = List.of(arguments).subList(rate ? 5 : 4, arguments.length);
            for (int requests = inFlight * topics.size(); requests > 0; requests -= REQUESTS_OF_A_CLIENT) {
                driver.open(arguments[1], topics);
            }
            perSecond = rate
                    ? driver.runFor(inFlight, Integer.parseInt(arguments[3]), Integer.parseInt(arguments[4]))
                    : driver.runOften(inFlight, Long.parseLong(arguments[3]));
        } finally {
            for (Side side : driver.sides) {
                side.client.close();
            }
        }
        System.out.println(perSecond);
    }

    private static void hold(String url, String topic) throws Exception {
        try (PulsarClient client = PulsarClient.builder().serviceUrl(url).enableTransaction(true).build();
                Producer<byte[]> producer = client.newProducer().topic(topic).sendTimeout(0, TimeUnit.SECONDS).create()) {
            BufferedReader wanted = new BufferedReader(new InputStreamReader(System.in));
            while (wanted.readLine() != null) {
                Transaction transaction =
                        client.newTransaction().withTransactionTimeout(10, TimeUnit.MINUTES).build().get();
                producer.newMessage(transaction).value("native".getBytes()).send();
                System.out.println("open");
                String end = wanted.readLine();
                ("commit".equals(end) ? transaction.commit() : transaction.abort()).get();
                System.out.println(end);
            }
        }
    }

    private void open(String url, List<String> topics) throws Exception {
        PulsarClient client = PulsarClient.builder().serviceUrl(url).enableTransaction(true).build();
        Side side = new Side(client, new ArrayList<>(), new AtomicInteger());
        sides.add(side);
        for (String topic : topics) {
            // A short timeout would abort queued transactions; all other settings are the client's defaults.
            side.producers.add(client.newProducer().topic(topic).sendTimeout(0, TimeUnit.SECONDS)
                    .blockIfQueueFull(true).create());
        }
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
        while (System.nanoTime() < end || ended.get() == before) { // on a slow machine at least one
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
        Side side = Collections.min(sides, Comparator.comparingInt(each -> each.open.get()));
        side.open.incrementAndGet();
        side.client.newTransaction().withTransactionTimeout(10, TimeUnit.MINUTES).build()
                .thenCompose(transaction -> writeAndEnd(side, transaction))
                .whenComplete((nothing, error) -> {
                    if (error != null) {
                        failure.compareAndSet(null, error);
                    } else {
                        ended.incrementAndGet();
                    }
                    side.open.decrementAndGet();
                    room.release();
                });
    }

    private CompletableFuture<Void> writeAndEnd(Side side, Transaction transaction) {
        CompletableFuture<?>[] sends = side.producers.stream()
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
