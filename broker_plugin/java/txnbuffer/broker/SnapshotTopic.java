package txnbuffer.broker;

import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executor;
import java.util.concurrent.TimeUnit;
import java.util.regex.Pattern;
import org.apache.bookkeeper.mledger.AsyncCallbacks.ManagedLedgerInfoCallback;
import org.apache.bookkeeper.mledger.ManagedLedgerException;
import org.apache.bookkeeper.mledger.ManagedLedgerInfo;
import org.apache.pulsar.broker.PulsarServerException;
import org.apache.pulsar.broker.service.BrokerService;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Reader;
import org.apache.pulsar.common.naming.TopicName;
import org.apache.pulsar.metadata.api.MetadataStore;
import txnbuffer.broker.Snapshot.Found;
import txnbuffer.broker.Snapshot.Kind;

/** Reads the snapshot of a topic with the broker's own client, up to an end that is taken after the call. */
final class SnapshotTopic {
    private static final String ANNOTATION = "txnbuffer.note";
    private static final Pattern ESCAPED = Pattern.compile("=(2F|3D|2E)");
    private static final String MANAGED_LEDGERS = "/managed-ledgers/";
    private static final long SECONDS = 60; // without progress

    private final BrokerService broker;
    private final TopicName topic;
    private final Executor executor;

    SnapshotTopic(BrokerService broker, TopicName topic, Executor executor) {
        this.broker = broker;
        this.topic = topic;
        this.executor = executor;
    }

    /** The name of the topic for txnbuffer: as broker_io/pulsar/cluster.py writes it. */
    private String name() {
        return ESCAPED.matcher(topic.getLocalName())
                .replaceAll(found -> String.valueOf((char) Integer.parseInt(found.group(1), 16)));
    }

    /** `incarnation` is the topic's property, null for a topic that another program created. */
    CompletableFuture<Found> read(String incarnation, String ledger) {
        TopicName all = TopicName.get("persistent://" + topic.getNamespace() + "/" + Snapshot.TOPIC);
        return broker.fetchPartitionedTopicMetadataAsync(all, true).thenCompose(metadata -> {
            String annotation = metadata.properties == null ? null : metadata.properties.get(ANNOTATION);
            String partition = Snapshot.partition(name(), Snapshot.shards(annotation, metadata.partitions));
            TopicName chosen = TopicName.get("persistent://" + topic.getNamespace() + "/" + partition);
            return exists(chosen).thenCompose(exists -> exists
                            ? incarnation(incarnation, ledger).thenCompose(mark -> scan(chosen.toString(), mark))
                            : CompletableFuture.completedFuture(Found.without(Kind.NONE)));
        });
    }

    /** What another broker has created counts as soon as it was answered: so it is not read from a cache. */
    private CompletableFuture<Boolean> exists(TopicName chosen) {
        MetadataStore store = broker.pulsar().getLocalMetadataStore();
        String path = MANAGED_LEDGERS + chosen.getPersistenceNamingEncoding();
        return store.sync(path).thenCompose(nothing -> store.get(path)).thenApply(Optional::isPresent);
    }

    /** As broker_io/pulsar/cluster.py has it: without the property, the creation date and the name. */
    private CompletableFuture<String> incarnation(String property, String ledger) {
        if (property != null) {
            return CompletableFuture.completedFuture(property);
        }
        CompletableFuture<String> found = new CompletableFuture<>();
        broker.getManagedLedgerFactoryForTopic(topic).thenAccept(factory -> factory.asyncGetManagedLedgerInfo(ledger,
                new ManagedLedgerInfoCallback() {
            @Override
            public void getInfoComplete(ManagedLedgerInfo info, Object context) {
                found.complete(info.creationDate + " " + topic);
            }

            @Override
            public void getInfoFailed(ManagedLedgerException error, Object context) {
                found.completeExceptionally(error);
            }
        }, null)).exceptionally(error -> {
            found.completeExceptionally(error);
            return null;
        });
        return found;
    }

    /** A topic that wants to know, and the messages of the partition that are its own. */
    private record Question(Snapshot snapshot, String incarnation, CompletableFuture<Found> answer) {
        void put(Message<byte[]> message) {
            byte[] value = message.getData();
            boolean empty = value == null || value.length == 0;
            snapshot.put(message.getKey(), message.getProperties(), empty ? null : value);
        }

        void end(Throwable error) {
            if (error != null) {
                answer.completeExceptionally(error);
                return;
            }
            try {
                answer.complete(snapshot.read(incarnation));
            } catch (Snapshot.Refused | RuntimeException failure) {
                answer.completeExceptionally(failure);
            }
        }
    }

    /** By partition, those that wait for the scan that begins when the present one ends; no list if there is none. */
    private static final Map<String, List<Question>> SCANS = new HashMap<>();

    private CompletableFuture<Found> scan(String partition, String incarnation) {
        Question question = new Question(new Snapshot(name()), incarnation, new CompletableFuture<>());
        synchronized (SCANS) {
            List<Question> waiting = SCANS.get(partition);
            if (waiting != null) {
                waiting.add(question);
                return question.answer;
            }
            SCANS.put(partition, new ArrayList<>());
        }
        scan(partition, List.of(question));
        return question.answer;
    }

    /** Read a partition once for all topics that were loaded meanwhile. */
    private void scan(String partition, List<Question> questions) {
        read(partition, questions).whenCompleteAsync((nothing, error) -> {
            questions.forEach(question -> question.end(error));
            List<Question> waiting;
            synchronized (SCANS) {
                waiting = SCANS.remove(partition);
                if (waiting.isEmpty()) {
                    return;
                }
                SCANS.put(partition, new ArrayList<>());
            }
            scan(partition, waiting);
        }, executor);
    }

    private CompletableFuture<Void> read(String partition, List<Question> questions) {
        CompletableFuture<Reader<byte[]>> opened;
        try {
            opened = broker.pulsar().getClient().newReader().topic(partition).startMessageId(MessageId.earliest)
                    .readCompacted(true).createAsync();
        } catch (PulsarServerException | RuntimeException error) {
            return CompletableFuture.failedFuture(error);
        }
        CompletableFuture<Reader<byte[]>> inTime = opened.copy().orTimeout(SECONDS, TimeUnit.SECONDS);
        opened.thenAccept(reader -> {
            if (inTime.isCompletedExceptionally()) {
                reader.closeAsync();
            }
        });
        return inTime.thenCompose(reader -> {
            CompletableFuture<Void> done = new CompletableFuture<>();
            next(reader, questions, done);
            return done.whenComplete((nothing, error) -> reader.closeAsync());
        });
    }

    private void next(Reader<byte[]> reader, List<Question> questions, CompletableFuture<Void> done) {
        reader.hasMessageAvailableAsync().thenComposeAsync(more -> more ? reader.readNextAsync()
                : CompletableFuture.completedFuture(null), executor).orTimeout(SECONDS, TimeUnit.SECONDS)
                .thenAcceptAsync(message -> {
            if (message == null) {
                done.complete(null);
                return;
            }
            questions.forEach(question -> question.put(message));
            next(reader, questions, done);
        }, executor).exceptionally(error -> {
            done.completeExceptionally(error);
            return null;
        });
    }
}
