package txnbuffer.broker;

import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.bookkeeper.mledger.ManagedLedger;
import org.apache.pulsar.PulsarVersion;
import org.apache.pulsar.broker.ServiceConfiguration;
import org.apache.pulsar.broker.service.BrokerService;
import org.apache.pulsar.broker.service.Topic;
import org.apache.pulsar.broker.service.TopicFactory;
import org.apache.pulsar.broker.service.persistent.PersistentTopic;
import org.apache.pulsar.common.naming.TopicName;

/**
 * Makes the topics of a broker. In broker.conf: {@code topicFactoryClassName=txnbuffer.broker.TxnTopicFactory} and
 * {@code allowOverrideEntryFilters=true}.
 */
public final class TxnTopicFactory implements TopicFactory {
    /** What the build wrote: {@code version} of this plug-in; {@code pulsar}, whose classes it extends, such as 4.0. */
    static final Properties BUILT = built();

    /**
     * Its version, and the newest version of each format that it reads, as broker_io/pulsar/broker.py reads them. It is
     * the name of a setting that nobody can set, because brokers list the names of these over REST, each its own ones.
     */
    static final String ANNOUNCED = String.join(",", "txnbuffer.plugin:version=" + BUILT.getProperty("version"),
            "protocol=" + Rules.ONE, "end=" + newest(Snapshot.ENDS), "part=" + newest(Snapshot.PARTS));

    private final AtomicBoolean announced = new AtomicBoolean();

    @Override
    @SuppressWarnings("unchecked")
    public <T extends Topic> T create(String name, ManagedLedger ledger, BrokerService broker, Class<T> kind) {
        if (!announced.getAndSet(true)) {
            broker.registerCustomDynamicConfiguration(ANNOUNCED, value -> false);
        }
        TopicName topic = TopicName.get(name);
        if (kind != PersistentTopic.class || topic.getLocalName().startsWith("__")
                || topic.getNamespace().startsWith("pulsar/")) {
            return null; // the broker's own class
        }
        String refused = refusal(PulsarVersion.getVersion(), broker.pulsar().getConfiguration());
        if (refused != null) {
            throw new IllegalStateException("txnbuffer: no topic is served: " + refused);
        }
        return (T) new TxnTopic(name, ledger, broker);
    }

    /** Why no topic of this broker can be filtered; null if all can. */
    static String refusal(String version, ServiceConfiguration conf) {
        String builtFor = BUILT.getProperty("pulsar") + ".";
        if (!version.startsWith(builtFor)) {
            return "the broker plug-in was built for Pulsar " + builtFor + "x, and this is " + version
                    + ": install the jar for this version, or remove topicFactoryClassName from broker.conf";
        }
        if (conf.isTransactionCoordinatorEnabled()) {
            return "transactionCoordinatorEnabled=true, but Pulsar's own transactions do not go together with the "
                    + "broker plug-in: set it to false in broker.conf";
        }
        if (!conf.isAllowOverrideEntryFilters()) {
            return "set allowOverrideEntryFilters=true in broker.conf: without it brokers do not ask topics for filters";
        }
        return null;
    }

    private static String newest(List<String> versions) {
        return versions.get(versions.size() - 1);
    }

    private static Properties built() {
        Properties read = new Properties();
        try (InputStream in = TxnTopicFactory.class.getResourceAsStream("/txnbuffer/plugin.properties")) {
            read.load(in);
        } catch (IOException e) {
            throw new UncheckedIOException(e);
        }
        return read;
    }
}
