import java.io.IOException;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.ConsumerBuilder;
import org.apache.pulsar.client.api.DeadLetterPolicy;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.Reader;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.TableView;

/**
 * Uses features of Pulsar's Java client on a topic and prints what it got: a line {@code FEATURE VALUE} for each message.
 *
 * <p>Arguments: the address of the broker, the topic, a time in milliseconds to seek to, and how many messages there are.
 */
public final class PlainFeatures {
    private static final int QUIET = 500; // milliseconds without a message after which none is expected

    private final PulsarClient client;
    private final String topic;
    private final int count;

    private PlainFeatures(PulsarClient client, String topic, int count) {
        this.client = client;
        this.topic = topic;
        this.count = count;
    }

    public static void main(String[] arguments) throws Exception {
        try (PulsarClient client = PulsarClient.builder().serviceUrl(arguments[0]).enableTransaction(false).build()) {
            PlainFeatures features = new PlainFeatures(client, arguments[1], Integer.parseInt(arguments[3]));
            features.reads(Long.parseLong(arguments[2]));
            features.table();
            features.acknowledgesSome();
            features.refusesSome();
            features.sendsDeadLetters();
        }
    }

    private static void print(String feature, Object value) {
        System.out.println(feature + "\t" + value);
    }

    private static String value(Message<byte[]> message) {
        return new String(message.getData());
    }

    private List<Message<byte[]>> rest(Reader<byte[]> reader) throws IOException {
        List<Message<byte[]>> found = new ArrayList<>();
        while (reader.hasMessageAvailable()) {
            found.add(reader.readNext());
        }
        return found;
    }

    private void reads(long time) throws IOException {
        Reader<byte[]> reader = client.newReader().topic(topic).startMessageId(MessageId.earliest).create();
        List<Message<byte[]>> all = rest(reader);
        all.forEach(message -> print("read", value(message)));
        print("last", reader.getLastMessageIds().get(0).compareTo(all.get(all.size() - 1).getMessageId()) == 0);
        all.forEach(message -> print("index", message.getIndex().orElse(-1L)));
        reader.seek(time);
        rest(reader).forEach(message -> print("seek-time", value(message)));
        reader.seek(all.get(2).getMessageId());
        rest(reader).forEach(message -> print("seek-id", value(message)));
        reader.seek(MessageId.latest);
        print("latest", rest(reader).size());
        reader.close();
    }

    private void table() throws IOException {
        try (TableView<byte[]> view = client.newTableView(Schema.BYTES).topic(topic).create()) {
            view.forEach((key, value) -> print("table", key + "=" + new String(value)));
        }
    }

    private ConsumerBuilder<byte[]> consumer(String name) {
        return client.newConsumer().topic(topic).subscriptionName("java-" + name)
                .subscriptionType(SubscriptionType.Shared).enableBatchIndexAcknowledgment(true)
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest)
                .negativeAckRedeliveryDelay(100, TimeUnit.MILLISECONDS);
    }

    private void acknowledgesSome() throws IOException {
        try (Consumer<byte[]> consumer = consumer("some").subscribe()) {
            for (int i = 0; i < count; i++) {
                Message<byte[]> message = consumer.receive();
                if (i % 2 == 0) {
                    consumer.acknowledge(message);
                }
            }
        }
        try (Consumer<byte[]> consumer = consumer("some").subscribe()) {
            for (Message<byte[]> next; (next = consumer.receive(QUIET, TimeUnit.MILLISECONDS)) != null;) {
                print("unacknowledged", value(next));
                consumer.acknowledge(next);
            }
        }
    }

    private void refusesSome() throws IOException {
        try (Consumer<byte[]> consumer = consumer("refused").subscribe()) {
            for (int i = 0; i < count; i++) {
                Message<byte[]> message = consumer.receive();
                if (i % 2 == 0) {
                    consumer.acknowledge(message);
                } else {
                    consumer.negativeAcknowledge(message);
                }
            }
            for (int i = 1; i < count; i += 2) {
                Message<byte[]> message = consumer.receive();
                print("refused", value(message));
                consumer.acknowledge(message);
            }
            print("refused-more", consumer.receive(QUIET, TimeUnit.MILLISECONDS) != null);
        }
    }

    /** The first message, `start`, goes through the retry topic to the dead letters. */
    private void sendsDeadLetters() throws IOException {
        DeadLetterPolicy policy = DeadLetterPolicy.builder().maxRedeliverCount(1).build();
        try (Consumer<byte[]> consumer = consumer("dead").enableRetry(true).deadLetterPolicy(policy).subscribe();
                Reader<byte[]> dead = client.newReader().topic(topic + "-java-dead-DLQ")
                        .startMessageId(MessageId.latest).create()) {
            for (int i = 0; i < count + 1; i++) {
                Message<byte[]> message = consumer.receive();
                if (value(message).equals("start")) {
                    consumer.reconsumeLater(message, 10, TimeUnit.MILLISECONDS);
                } else {
                    consumer.acknowledge(message);
                }
            }
            Message<byte[]> message = dead.readNext();
            print("dead", value(message));
            message.getProperties().keySet().stream().filter(name -> name.startsWith("tb.")).sorted()
                    .forEach(name -> print("dead-property", name));
        }
    }
}
