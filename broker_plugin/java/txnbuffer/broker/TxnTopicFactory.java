package txnbuffer.broker;

import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;
import java.lang.reflect.Method;
import java.lang.reflect.Modifier;
import java.util.Arrays;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.stream.Stream;
import org.apache.bookkeeper.mledger.ManagedLedger;
import org.apache.pulsar.PulsarVersion;
import org.apache.pulsar.broker.ServiceConfiguration;
import org.apache.pulsar.broker.namespace.NamespaceService;
import org.apache.pulsar.broker.service.BrokerService;
import org.apache.pulsar.broker.service.ServerCnx;
import org.apache.pulsar.broker.service.Topic;
import org.apache.pulsar.broker.service.TopicFactory;
import org.apache.pulsar.broker.service.persistent.PersistentTopic;
import org.apache.pulsar.common.naming.SystemTopicNames;
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

    /** What this broker lacks of the methods that the plug-in overrides or knows by name; 4.0.2 lacks one. */
    private static final List<String> LACKING = Stream.concat(
            Stream.of(TxnTopic.class, RawSubscription.class).flatMap(TxnTopicFactory::overridingNothing),
            Stream.of(TxnTopic.LAST_INDEX, RawSubscription.LAST_ID).filter(name ->
                    Arrays.stream(ServerCnx.class.getDeclaredMethods()).noneMatch(one -> one.getName().equals(name))))
            .toList();

    private final AtomicBoolean announced = new AtomicBoolean();

    @Override
    @SuppressWarnings("unchecked")
    public <T extends Topic> T create(String name, ManagedLedger ledger, BrokerService broker, Class<T> kind) {
        if (!announced.getAndSet(true)) {
            broker.registerCustomDynamicConfiguration(ANNOUNCED, value -> false);
        }
        TopicName topic = TopicName.get(name);
        if (kind != PersistentTopic.class || topic.getLocalName().startsWith(TopicLog.SUBSCRIPTION)
                || SystemTopicNames.isSystemTopic(topic)
                || NamespaceService.isSystemServiceNamespace(topic.getNamespace())) {
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
        if (!LACKING.isEmpty()) {
            return "Pulsar " + version + " lacks methods that the broker plug-in needs (" + String.join(", ", LACKING)
                    + "): use a later release of Pulsar " + builtFor + "x, such as 4.0.8";
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

    /** The methods of a class for its super class that this does not have, so that the broker would never call them. */
    static Stream<String> overridingNothing(Class<?> own) {
        return Arrays.stream(own.getDeclaredMethods())
                .filter(one -> Modifier.isPublic(one.getModifiers()) || Modifier.isProtected(one.getModifiers()))
                .filter(one -> !one.isSynthetic() && !isDeclared(own.getSuperclass(), one))
                .map(one -> own.getSuperclass().getSimpleName() + "." + one.getName()).distinct().sorted();
    }

    private static boolean isDeclared(Class<?> type, Method wanted) {
        return type != null && (Arrays.stream(type.getDeclaredMethods()).anyMatch(one ->
                one.getName().equals(wanted.getName())
                        && Arrays.equals(one.getParameterTypes(), wanted.getParameterTypes())
                        && !Modifier.isPrivate(one.getModifiers()))
                || isDeclared(type.getSuperclass(), wanted));
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
