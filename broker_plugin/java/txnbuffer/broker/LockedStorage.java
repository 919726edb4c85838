package txnbuffer.broker;

import java.util.Optional;
import org.apache.pulsar.broker.ManagedLedgerClientFactory;
import org.apache.pulsar.broker.storage.ManagedLedgerStorageClass;

/**
 * The storage of a broker under one more name. A namespace whose policy asks for that name is refused by brokers that do
 * not know it, so by all without the plug-in. In broker.conf:
 * {@code managedLedgerStorageClassName=txnbuffer.broker.LockedStorage}.
 */
public final class LockedStorage extends ManagedLedgerClientFactory {
    /** As in broker_io/pulsar/plug_in.py. */
    private static final String NAME = "txnbuffer";

    @Override
    public Optional<ManagedLedgerStorageClass> getManagedLedgerStorageClass(String name) {
        return NAME.equals(name) ? Optional.of(getDefaultStorageClass()) : super.getManagedLedgerStorageClass(name);
    }
}
