import java.util.Base64;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.Reader;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.SubscriptionType;

/**
 * Plain consumers of a topic with Pulsar's Java client: a line `KIND PLACE KEY VALUE` for each message, until the end of
 * the standard input.
 *
 * <p>Arguments: the address of the broker, the topic, and kinds of subscriptions, or "reader". Key and value are in base64.
 */
public final class PlainConsumer {
    public static void main(String[] arguments) throws Exception {
        try (PulsarClient client = PulsarClient.builder().serviceUrl(arguments[0]).build()) {
            for (int kind = 2; kind < arguments.length; kind++) {
                start(client, arguments[1], arguments[kind]);
            }
            while (System.in.read() >= 0) {
                // wait for the end
            }
        }
    }

    private interface Step {
        void run() throws PulsarClientException;
    }

    /** Each in a thread of its own: listeners of a Key_Shared consumer run in several, so the order is lost without keys. */
    private static void start(PulsarClient client, String topic, String kind) throws PulsarClientException {
        if (kind.equals("reader")) {
            Reader<byte[]> reader = client.newReader().topic(topic).startMessageId(MessageId.earliest).create();
            repeat(() -> print(kind, reader.readNext()));
            return;
        }
        Consumer<byte[]> consumer = client.newConsumer().topic(topic).subscriptionName("java-" + kind)
                .subscriptionType(SubscriptionType.valueOf(kind))
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest).subscribe();
        repeat(() -> {
            Message<byte[]> message = consumer.receive();
            print(kind, message);
            consumer.acknowledgeAsync(message);
        });
    }

    private static void repeat(Step step) {
        Thread thread = new Thread(() -> {
            try {
                while (true) {
                    step.run();
                }
            } catch (PulsarClientException error) {
                throw new IllegalStateException(error);
            }
        });
        thread.setDaemon(true);
        thread.start();
    }

    private static void print(String kind, Message<byte[]> message) {
        String key = message.hasKey() ? message.getKey() : "";
        Base64.Encoder encoder = Base64.getEncoder();
        synchronized (System.out) {
            System.out.println(String.join(
                    "\t", kind, message.getMessageId().toString(), encoder.encodeToString(key.getBytes()),
                    encoder.encodeToString(message.getValue())));
        }
    }
}
