package txnbuffer.broker;

import io.netty.buffer.ByteBuf;
import java.io.IOException;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Proxy;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import org.apache.bookkeeper.mledger.AsyncCallbacks.ReadEntryCallback;
import org.apache.bookkeeper.mledger.Entry;
import org.apache.bookkeeper.mledger.ManagedCursor;
import org.apache.bookkeeper.mledger.ManagedLedger;
import org.apache.bookkeeper.mledger.ManagedLedgerException;
import org.apache.bookkeeper.mledger.Position;
import org.apache.bookkeeper.mledger.PositionFactory;
import org.apache.bookkeeper.mledger.impl.EntryBuffer;
import org.apache.pulsar.PulsarVersion;
import org.apache.pulsar.broker.service.BrokerService;
import org.apache.pulsar.broker.service.BrokerServiceException.NotAllowedException;
import org.apache.pulsar.broker.service.Consumer;
import org.apache.pulsar.broker.service.GetStatsOptions;
import org.apache.pulsar.broker.service.Replicator;
import org.apache.pulsar.broker.service.Subscription;
import org.apache.pulsar.broker.service.SubscriptionOption;
import org.apache.pulsar.broker.service.persistent.PersistentTopic;
import org.apache.pulsar.broker.service.plugin.EntryFilter;
import org.apache.pulsar.client.impl.BatchMessageIdImpl;
import org.apache.pulsar.client.impl.MessageIdImpl;
import org.apache.pulsar.common.api.proto.CommandSubscribe.InitialPosition;
import org.apache.pulsar.common.policies.data.stats.SubscriptionStatsImpl;
import org.apache.pulsar.common.policies.data.stats.TopicStatsImpl;
import org.apache.pulsar.common.protocol.Commands;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/** A topic that dispatches only what is decided and visible, except to the readers of txnbuffer. */
final class TxnTopic extends PersistentTopic {
    /** The method of a connection that reads the last entry of a topic, for the id of its last message. */
    static final String LAST_INDEX = "getLargestBatchIndexWhenPossible";

    private static final Logger LOG = LoggerFactory.getLogger(TxnTopic.class);
    private static final VisibleFilter FILTER = new VisibleFilter();

    /** The last visible entry, as of a bound; `partial`: only some of its messages are visible. */
    private record Last(Position bound, Position entry, boolean partial) { }

    private final TopicLog log;
    private final Object searching = new Object();
    private CompletableFuture<Position> search = CompletableFuture.completedFuture(null);
    private volatile Last last;

    TxnTopic(String topic, ManagedLedger ledger, BrokerService broker) {
        super(topic, ledger, broker);
        log = new TopicLog(this, ledger);
    }

    TopicLog log() {
        return log;
    }

    static boolean calledBy(String method) {
        return StackWalker.getInstance().walk(frames -> frames.skip(2).findFirst()
                .map(frame -> frame.getMethodName().equals(method)).orElse(false));
    }

    // The life of the topic

    @Override
    public CompletableFuture<Void> initialize() {
        return super.initialize().thenRun(log::load);
    }

    @Override
    public void publishMessage(ByteBuf data, PublishContext context) {
        String producer = context.getProducerName();
        boolean look = log.mayHaveTransactions() && producer != null
                && Copies.mayBeSentBy(getProducers().get(producer));
        ByteBuf changed = look ? Copies.asOrdinary(data) : null;
        if (changed == null) {
            super.publishMessage(data, context);
            return;
        }
        try {
            super.publishMessage(changed, context);
        } finally {
            changed.release(); // the ledger retains it
        }
    }

    @Override
    public void addComplete(Position at, ByteBuf data, Object context) {
        log.stored(at, data);
        super.addComplete(at, data, context);
    }

    /** Called every few minutes. */
    @Override
    public void checkMessageExpiry() {
        super.checkMessageExpiry();
        log.trim();
    }

    @Override
    public CompletableFuture<Void> close(boolean disconnectClients, boolean withoutWaiting) {
        return super.close(disconnectClients, withoutWaiting).thenRun(log::close);
    }

    /** The state is among the properties of txnbuffer's subscription, which clients of the REST interface keep. */
    @Override
    public CompletableFuture<? extends TopicStatsImpl> asyncGetStats(GetStatsOptions options) {
        return super.asyncGetStats(options).thenApply(stats -> {
            SubscriptionStatsImpl own = stats.subscriptions.get(TopicLog.SUBSCRIPTION);
            if (own != null) {
                Map<String, String> properties = new HashMap<>(own.subscriptionProperties);
                properties.putAll(log.state());
                own.subscriptionProperties = properties;
            }
            return stats;
        });
    }

    /** A new partition gets the subscriptions of the first one, with the properties that its stats show. */
    @Override
    public CompletableFuture<Subscription> createSubscription(String name, InitialPosition position, boolean replicates,
            Map<String, String> properties) {
        Map<String, String> own = new HashMap<>(properties == null ? Map.of() : properties);
        if (name.equals(TopicLog.SUBSCRIPTION)) {
            own.keySet().removeIf(each -> each.startsWith(TopicLog.STATE));
        }
        return super.createSubscription(name, position, replicates, own);
    }

    // What dispatchers may read

    @Override
    public Position getMaxReadPosition() {
        return log == null ? PositionFactory.EARLIEST : log.bound(); // null in the constructor of the super class
    }

    @Override
    public List<EntryFilter> getEntryFilters() {
        List<EntryFilter> configured = super.getEntryFilters();
        if (configured == null || configured.isEmpty()) {
            configured = getBrokerService().getEntryFilterProvider().getBrokerEntryFilters();
        }
        List<EntryFilter> all = new ArrayList<>(List.of(FILTER)); // the others see what consumers see
        all.addAll(configured);
        return all;
    }

    // Replication, which would copy what is not committed

    @Override
    protected CompletableFuture<Void> addReplicationCluster(String remote, ManagedCursor cursor, String local) {
        return refusesReplication(remote, cursor) ? CompletableFuture.completedFuture(null)
                : super.addReplicationCluster(remote, cursor, local);
    }

    @Override
    protected CompletableFuture<Void> addShadowReplicationCluster(String shadow, ManagedCursor cursor) {
        return refusesReplication(shadow, cursor) ? CompletableFuture.completedFuture(null)
                : super.addShadowReplicationCluster(shadow, cursor);
    }

    private boolean refusesReplication(String where, ManagedCursor cursor) {
        if (log.isMarked()) {
            LOG.error("[{}] txnbuffer: not replicated to {}, which would get what is not committed", getName(), where);
            ledger.asyncDeleteCursor(cursor.getName(), TopicLog.IGNORED, null); // it would keep messages
        }
        return log.isMarked();
    }

    /** End the replication that began before the topic had transactions. */
    void refuseReplication() {
        if (log.isMarked()) {
            List<Replicator> running = new ArrayList<>(getReplicators().values());
            running.addAll(getShadowReplicators().values());
            running.forEach(one -> one.terminate().thenRun(this::checkReplication)); // which removes the cursor
        }
    }

    // Where the topic ends

    /** Completed for raw readers, so that the same thread asks for the end next. */
    @Override
    public CompletableFuture<Void> checkIfTransactionBufferRecoverCompletely() {
        return RawSubscription.isAsked() ? CompletableFuture.completedFuture(null) : log.loaded();
    }

    @Override
    public CompletableFuture<Position> getLastDispatchablePosition() {
        if (RawSubscription.isAsked()) {
            RawSubscription.answered();
            return ledger.getLastDispatchablePosition(entry -> true, ledger.getLastConfirmedEntry());
        }
        return lastVisible();
    }

    /** One search at a time: it may take longer than clients wait, and the next one looks at what is new only. */
    private CompletableFuture<Position> lastVisible() {
        Position end = getMaxReadPosition();
        synchronized (searching) {
            Last known = last;
            if (known != null && known.bound.equals(end)) {
                return CompletableFuture.completedFuture(known.entry);
            }
            if (search.isDone()) {
                search = search(end, known);
                return search;
            }
            return search.handle((found, error) -> found).thenCompose(ignored -> lastVisible());
        }
    }

    private CompletableFuture<Position> search(Position bound, Last known) {
        Position end = bound.getEntryId() < 0 ? ledger.getPreviousPosition(bound) : bound;
        boolean[] partial = new boolean[1];
        return ledger.getLastDispatchablePosition(entry -> {
            if (known != null && entry.getPosition().compareTo(known.bound) <= 0) {
                return true; // what is at and before it was looked at
            }
            return isShown(entry, partial);
        }, end).thenApply(found -> {
            Last now = known != null && found.compareTo(known.bound) <= 0
                    ? new Last(bound, known.entry, known.partial) : new Last(bound, found, partial[0]);
            last = now;
            return now.entry;
        });
    }

    /** Whether something of an entry is visible, and if not all is, partial[0]. */
    private boolean isShown(Entry entry, boolean[] partial) {
        Rules rules = log.rules();
        if (rules == null || rules.isVisible(entry.getLedgerId(), entry.getEntryId())) {
            return true;
        }
        try {
            Packed.Count count = Packed.count(entry.getPosition(), entry.getDataBuffer(), rules);
            partial[0] = count.partial();
            return count.all == 0 || count.visible > 0;
        } catch (IOException error) {
            throw new IllegalStateException(error);
        }
    }

    /** ServerCnx answers with the number of messages that the last entry has in the log: show it the rewritten one. */
    @Override
    public ManagedLedger getManagedLedger() {
        Last known = last;
        return known != null && known.partial && calledBy(LAST_INDEX) ? rewriting(known.entry)
                : super.getManagedLedger();
    }

    private ManagedLedger rewriting(Position only) {
        return (ManagedLedger) Proxy.newProxyInstance(TxnTopic.class.getClassLoader(),
                new Class<?>[] {ManagedLedger.class}, (self, method, arguments) -> {
            if (method.getName().equals("asyncReadEntry") && arguments[0] == only) {
                arguments[1] = rewriting((ReadEntryCallback) arguments[1]);
            }
            try {
                return method.invoke(ledger, arguments);
            } catch (InvocationTargetException error) {
                throw error.getCause();
            }
        });
    }

    private ReadEntryCallback rewriting(ReadEntryCallback callback) {
        return new ReadEntryCallback() {
            @Override
            public void readEntryComplete(Entry entry, Object context) {
                try {
                    EntryBuffer.replace(entry, Packed.rewrite(entry.getPosition(), entry.getDataBuffer(),
                            Commands.peekAndCopyMessageMetadata(entry.getDataBuffer(), getName(), -1),
                            log.rules()));
                } catch (IOException | RuntimeException error) {
                    entry.release();
                    callback.readEntryFailed(new ManagedLedgerException(error), context);
                    return;
                }
                callback.readEntryComplete(entry, context);
            }

            @Override
            public void readEntryFailed(ManagedLedgerException error, Object context) {
                callback.readEntryFailed(error, context);
            }
        };
    }

    // Who reads what

    @Override
    public CompletableFuture<Consumer> subscribe(SubscriptionOption option) {
        String refused = TxnTopicFactory.refusal(PulsarVersion.getVersion(),
                getBrokerService().pulsar().getConfiguration()); // settings can change while the broker runs
        boolean raw = RawSubscription.isNamed(option.getSubscriptionName());
        if (refused == null && raw) {
            refused = RawSubscription.refusal(option, RawSubscription.roles(this));
        } else if (refused == null && isCompactionSubscription(option.getSubscriptionName()) && log.hadTransactions()) {
            refused = "the broker's compaction ignores transactions, so a topic that may have some is not compacted";
        }
        if (refused != null) {
            return CompletableFuture.failedFuture(new NotAllowedException("txnbuffer: " + refused));
        }
        if (raw) {
            try {
                addRaw(option);
            } catch (ManagedLedgerException error) {
                return CompletableFuture.failedFuture(error);
            }
        }
        return super.subscribe(option);
    }

    /** The broker would make a subscription of its own class; this does the same with ours. */
    private void addRaw(SubscriptionOption option) throws ManagedLedgerException {
        String name = option.getSubscriptionName();
        synchronized (ledger) {
            if (getSubscriptions().containsKey(name)) {
                return;
            }
            MessageIdImpl id = (MessageIdImpl) option.getStartMessageId();
            Position after = PositionFactory.LATEST;
            if (id != null) {
                boolean within = id instanceof BatchMessageIdImpl && id.getLedgerId() >= 0 && id.getEntryId() >= 0;
                after = PositionFactory.create(id.getLedgerId(), id.getEntryId() - (within ? 1 : 0));
            }
            ManagedCursor cursor = ledger.newNonDurableCursor(after, name, option.getInitialPosition(),
                    option.isReadCompacted());
            getSubscriptions().put(name, new RawSubscription(this, name, cursor,
                    option.getSubscriptionProperties().orElse(Map.of())));
        }
    }
}
