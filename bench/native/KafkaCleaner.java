import java.io.File;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Comparator;
import java.util.HashMap;
import java.util.Map;
import java.util.Optional;
import java.util.Random;
import java.util.stream.Stream;
import org.apache.kafka.common.compress.Compression;
import org.apache.kafka.common.record.internal.MemoryRecords;
import org.apache.kafka.common.record.internal.Record;
import org.apache.kafka.common.record.internal.SimpleRecord;
import org.apache.kafka.common.utils.Time;
import org.apache.kafka.server.util.KafkaScheduler;
import org.apache.kafka.storage.internals.log.Cleaner;
import org.apache.kafka.storage.internals.log.CleanerStats;
import org.apache.kafka.storage.internals.log.LogConfig;
import org.apache.kafka.storage.internals.log.LogDirFailureChannel;
import org.apache.kafka.storage.internals.log.LogSegment;
import org.apache.kafka.storage.internals.log.LogToClean;
import org.apache.kafka.storage.internals.log.ProducerStateManagerConfig;
import org.apache.kafka.storage.internals.log.SkimpyOffsetMap;
import org.apache.kafka.storage.internals.log.UnifiedLog;
import org.apache.kafka.storage.internals.utils.Throttler;
import org.apache.kafka.storage.log.metrics.BrokerTopicStats;

/**
 * Cleans a log with Kafka's log cleaner, after a smaller one to warm up, and prints one JSON object.
 *
 * <p>Arguments: a directory, records, keys, bytes of the offset map. Records have keys of 12 bytes, chosen at random, and
 * random values of 100 bytes, in batches of 8,000, in segments of 64 MiB. The newest value of each key is compared with
 * the log after cleaning.
 */
public final class KafkaCleaner {
    private static final int BATCH = 8_000;
    private static final int VALUE_BYTES = 100;
    private static final int IO_BYTES = 4 << 20;

    public static void main(String[] arguments) throws Exception {
        Path directory = Path.of(arguments[0]);
        int records = Integer.parseInt(arguments[1]);
        int keys = Integer.parseInt(arguments[2]);
        int mapBytes = Integer.parseInt(arguments[3]);
        KafkaScheduler scheduler = new KafkaScheduler(1);
        scheduler.startup();
        for (int round = 0; round < 3; round++) {
            run(directory, scheduler, Math.min(records, 1_000_000), Math.min(keys, 200_000), 64 << 20);
        }
        System.out.println(run(directory, scheduler, records, keys, mapBytes));
        scheduler.shutdown();
    }

    private static String run(Path parent, KafkaScheduler scheduler, int records, int keys, int mapBytes)
            throws Exception {
        Path directory = Files.createDirectories(parent.resolve("bench-0"));
        Map<String, Object> settings = new HashMap<>();
        settings.put("segment.bytes", 64 << 20);
        settings.put("cleanup.policy", "compact");
        settings.put("max.message.bytes", 4 << 20);
        UnifiedLog log = UnifiedLog.create(
                directory.toFile(), new LogConfig(settings), 0L, 0L, scheduler, new BrokerTopicStats(), Time.SYSTEM,
                300_000, new ProducerStateManagerConfig(86_400_000, false), 600_000, new LogDirFailureChannel(1), true,
                Optional.empty());
        try {
            int[] newest = fill(log, records, keys);
            log.roll();
            log.updateHighWatermark(log.logEndOffset());
            long before = log.size();
            Cleaner cleaner = new Cleaner(
                    0, new SkimpyOffsetMap(mapBytes), IO_BYTES, 16 << 20, 0.9,
                    new Throttler(Double.MAX_VALUE, 300, "bench", "bytes", Time.SYSTEM), Time.SYSTEM, partition -> { });
            long end = log.activeSegment().baseOffset();
            long dirty = 0;
            long read = 0;
            int rounds = 0;
            long began = System.nanoTime();
            while (dirty < end) {
                Map.Entry<Long, CleanerStats> done = cleaner.clean(new LogToClean(log, dirty, end, false));
                dirty = done.getKey();
                read += done.getValue().bytesRead();
                rounds++;
            }
            double seconds = (System.nanoTime() - began) / 1e9;
            check(log, newest);
            return String.format(
                    "{\"seconds\": %.4f, \"rounds\": %d, \"bytes_read\": %d, \"bytes_before\": %d, \"bytes_after\": %d}",
                    seconds, rounds, read, before, log.size());
        } finally {
            log.close();
            remove(directory);
        }
    }

    /** Appends the records; returns the number of the newest record of each key, or -1. */
    private static int[] fill(UnifiedLog log, int records, int keys) throws IOException {
        Random random = new Random(1);
        int[] newest = new int[keys];
        java.util.Arrays.fill(newest, -1);
        for (int start = 0; start < records; start += BATCH) {
            SimpleRecord[] batch = new SimpleRecord[Math.min(BATCH, records - start)];
            for (int index = 0; index < batch.length; index++) {
                int key = random.nextInt(keys);
                byte[] value = new byte[VALUE_BYTES];
                random.nextBytes(value);
                ByteBuffer.wrap(value).putInt(start + index);
                newest[key] = start + index;
                batch[index] = new SimpleRecord(1L + start, String.format("key-%08d", key).getBytes(), value);
            }
            log.appendAsLeader(MemoryRecords.withRecords(Compression.NONE, batch), 0);
        }
        return newest;
    }

    /** Raises an error unless the log has exactly the newest record of each key. */
    private static void check(UnifiedLog log, int[] newest) {
        int missing = 0;
        for (int number : newest) {
            missing += number >= 0 ? 1 : 0;
        }
        for (LogSegment segment : log.logSegments()) {
            for (Record record : segment.log().records()) {
                byte[] key = new byte[record.keySize()];
                record.key().get(key);
                int number = Integer.parseInt(new String(key).substring(4));
                if (newest[number] != record.value().getInt()) {
                    throw new IllegalStateException("an old record of key " + number + " is left");
                }
                missing--;
            }
        }
        if (missing != 0) {
            throw new IllegalStateException(missing + " keys are missing");
        }
    }

    private static void remove(Path directory) throws IOException {
        try (Stream<Path> paths = Files.walk(directory)) {
            paths.sorted(Comparator.reverseOrder()).map(Path::toFile).forEach(File::delete);
        }
    }
}
