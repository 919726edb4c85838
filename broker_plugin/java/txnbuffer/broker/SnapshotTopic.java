package txnbuffer.broker;

import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
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
import txnbuffer.broker.Snapshot.Found;
import txnbuffer.broker.Snapshot.Kind;

/** Reads the snapshot of a topic with the broker's own client, up to an end that is taken after the call. */
final class SnapshotTopic {
    private static final String ANNOTATION = "txnbuffer.note";
    private static final Pattern ESCAPED = Pattern.compile("=(2F|3D|2E)");
    private static final long SECONDS = 60;

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
        return broker.fetchPartitionedTopicMetadataAsync(all).thenCompose(metadata -> {
            String annotation = metadata.properties == null ? null : metadata.properties.get(ANNOTATION);
            String partition = Snapshot.partition(name(), Snapshot.shards(annotation, metadata.partitions));
            TopicName chosen = TopicName.get("persistent://" + topic.getNamespace() + "/" + partition);
            return broker.pulsar().getPulsarResources().getTopicResources().persistentTopicExists(chosen)
                    .thenCompose(exists -> exists
                            ? incarnation(incarnation, ledger).thenCompose(mark -> scan(chosen.toString(), mark))
                            : CompletableFuture.completedFuture(Found.without(Kind.NONE)));
        });
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

    private CompletableFuture<Found> scan(String partition, String incarnation) {
        Snapshot snapshot = new Snapshot(name());
        CompletableFuture<Reader<byte[]>> opened;
        try {
            opened = broker.pulsar().getClient().newReader().topic(partition).startMessageId(MessageId.earliest)
                    .readCompacted(true).createAsync();
        } catch (PulsarServerException error) {
            return CompletableFuture.failedFuture(error);
        }
        return opened.thenCompose(reader -> {
            CompletableFuture<Found> done = new CompletableFuture<>();
            next(reader, snapshot, done, incarnation);
            return done.orTimeout(SECONDS, TimeUnit.SECONDS).whenComplete((found, error) -> reader.closeAsync());
        });
    }

    private void next(Reader<byte[]> reader, Snapshot snapshot, CompletableFuture<Found> done, String incarnation) {
        reader.hasMessageAvailableAsync().thenComposeAsync(more -> more ? reader.readNextAsync()
                : CompletableFuture.completedFuture(null), executor).whenCompleteAsync((message, error) -> {
            try {
                if (error != null) {
                    done.completeExceptionally(error);
                } else if (message == null) {
                    done.complete(snapshot.read(incarnation));
                } else if (!done.isDone()) {
                    put(snapshot, message);
                    next(reader, snapshot, done, incarnation);
                }
            } catch (Snapshot.Refused | RuntimeException failure) {
                done.completeExceptionally(new CompletionException(failure));
            }
        }, executor);
    }

    private static void put(Snapshot snapshot, Message<byte[]> message) {
        byte[] value = message.getData();
        snapshot.put(message.getKey(), message.getProperties(), value == null || value.length == 0 ? null : value);
    }
}
