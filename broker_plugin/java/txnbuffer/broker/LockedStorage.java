package txnbuffer.broker;

import io.netty.channel.EventLoopGroup;
import io.opentelemetry.api.OpenTelemetry;
import java.util.Optional;
import org.apache.pulsar.PulsarVersion;
import org.apache.pulsar.broker.BookKeeperClientFactory;
import org.apache.pulsar.broker.ManagedLedgerClientFactory;
import org.apache.pulsar.broker.ServiceConfiguration;
import org.apache.pulsar.broker.storage.ManagedLedgerStorageClass;
import org.apache.pulsar.metadata.api.extended.MetadataStoreExtended;

/**
 * The storage of a broker under one more name. A namespace whose policy asks for that name is refused by brokers that do
 * not know it, so by all without the plug-in. In broker.conf:
 * {@code managedLedgerStorageClassName=txnbuffer.broker.LockedStorage}.
 */
public final class LockedStorage extends ManagedLedgerClientFactory {
    /** As in broker_io/pulsar/plug_in.py. */
    private static final String NAME = "txnbuffer";

    /** A broker that cannot filter does not start, as it would have the name. */
    @Override
    public void initialize(ServiceConfiguration conf, MetadataStoreExtended metadata, BookKeeperClientFactory bookkeeper,
            EventLoopGroup events, OpenTelemetry telemetry) throws Exception {
        String factory = TxnTopicFactory.class.getName();
        String refused = factory.equals(conf.getTopicFactoryClassName())
                ? TxnTopicFactory.refusal(PulsarVersion.getVersion(), conf)
                : "set topicFactoryClassName=" + factory + " in broker.conf, or remove managedLedgerStorageClassName";
        if (refused != null) {
            throw new IllegalStateException("txnbuffer: the broker does not start: " + refused);
        }
        super.initialize(conf, metadata, bookkeeper, events, telemetry);
    }

    @Override
    public Optional<ManagedLedgerStorageClass> getManagedLedgerStorageClass(String name) {
        return NAME.equals(name) ? Optional.of(getDefaultStorageClass()) : super.getManagedLedgerStorageClass(name);
    }
}
