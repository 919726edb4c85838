package txnbuffer.broker;

import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Proxy;
import java.util.Arrays;
import java.util.Map;
import org.apache.bookkeeper.mledger.ManagedCursor;
import org.apache.bookkeeper.mledger.Position;
import org.apache.bookkeeper.mledger.PositionFactory;
import org.apache.pulsar.broker.service.Consumer;
import org.apache.pulsar.broker.service.Dispatcher;
import org.apache.pulsar.broker.service.ServerCnx;
import org.apache.pulsar.broker.service.SubscriptionOption;
import org.apache.pulsar.broker.service.Topic;
import org.apache.pulsar.broker.service.persistent.PersistentDispatcherSingleActiveConsumer;
import org.apache.pulsar.broker.service.persistent.PersistentSubscription;
import org.apache.pulsar.broker.service.persistent.PersistentTopic;
import org.apache.pulsar.common.api.proto.CommandSubscribe.SubType;

/** A reader of txnbuffer: it gets the log as it is, with markers and what is not decided, at once. */
final class RawSubscription extends PersistentSubscription {
    /** The method of a connection that asks a subscription for its topic, for the id of the last message there. */
    static final String LAST_ID = "handleGetLastMessageId";
    private static final String NAME = "__txnbuffer";
    private static final String ROLES = "txnbufferRawRoles";

    private static final ThreadLocal<Boolean> ASKED = new ThreadLocal<>();

    RawSubscription(PersistentTopic topic, String name, ManagedCursor cursor, Map<String, String> properties) {
        super(topic, name, cursor, false, properties);
    }

    /** A name of broker_io/pulsar/cluster.py, which follows the role if subscriptions have to begin with it. */
    static boolean isNamed(String subscription) {
        return subscription.startsWith(NAME) || subscription.contains("-" + NAME);
    }

    /** Why somebody may not read the log as it is; null if they may. */
    static String refusal(SubscriptionOption option, Object roles) {
        String name = option.getSubscriptionName();
        if (option.isDurable()) {
            return "subscription " + name + ": names with " + NAME + " are those of txnbuffer's own readers; the durable"
                    + " subscription " + NAME + " keeps messages and has no consumers";
        }
        if (option.getSubType() != SubType.Exclusive) {
            return "subscription " + name + ": those with " + NAME + " in their names are exclusive";
        }
        if (roles == null || String.valueOf(roles).isBlank()) {
            return null;
        }
        String role = option.getCnx() instanceof ServerCnx connection ? connection.getPrincipal() // not that of a proxy
                : option.getCnx().getAuthRole();
        boolean listed = Arrays.stream(String.valueOf(roles).split(",")).anyMatch(one -> one.trim().equals(role));
        return listed ? null : "role " + role + " may not read what is not committed: it is not one of " + ROLES
                + " in broker.conf";
    }

    static Object roles(PersistentTopic topic) {
        return topic.getBrokerService().pulsar().getConfiguration().getProperties().get(ROLES);
    }

    @Override
    protected Dispatcher reuseOrCreateDispatcher(Dispatcher dispatcher, Consumer consumer) {
        return dispatcher != null ? dispatcher
                : new PersistentDispatcherSingleActiveConsumer(unbounded(cursor), SubType.Exclusive, 0, topic, this);
    }

    /** A cursor that reads beyond the position up to which a dispatcher may read. */
    private static ManagedCursor unbounded(ManagedCursor cursor) {
        return (ManagedCursor) Proxy.newProxyInstance(RawSubscription.class.getClassLoader(),
                new Class<?>[] {ManagedCursor.class}, (self, method, arguments) -> {
            Class<?>[] types = method.getParameterTypes();
            if (method.getName().startsWith("asyncReadEntries")) {
                for (int i = 0; i < types.length; i++) {
                    if (types[i] == Position.class) {
                        arguments[i] = PositionFactory.LATEST;
                    }
                }
            }
            try {
                return method.invoke(cursor, arguments);
            } catch (InvocationTargetException error) {
                throw error.getCause();
            }
        });
    }

    /** ServerCnx asks a consumer's topic where it ends, and does not say who asked. */
    @Override
    public Topic getTopic() {
        if (TxnTopic.calledBy(LAST_ID)) {
            ASKED.set(true);
        }
        return super.getTopic();
    }

    /** Whether this thread answers such a question for a subscription of this class. */
    static boolean isAsked() {
        return ASKED.get() != null;
    }

    /** The question is answered. */
    static void answered() {
        ASKED.remove();
    }
}
