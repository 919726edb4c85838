package txnbuffer.broker;

import java.io.IOException;
import org.apache.bookkeeper.mledger.Entry;
import org.apache.bookkeeper.mledger.impl.EntryBuffer;
import org.apache.pulsar.broker.service.Subscription;
import org.apache.pulsar.broker.service.plugin.EntryFilter;
import org.apache.pulsar.broker.service.plugin.FilterContext;
import org.apache.pulsar.common.api.proto.MessageMetadata;

/** Hides markers and what did not commit, among what the topic lets dispatchers read. */
final class VisibleFilter implements EntryFilter {
    @Override
    public FilterResult filterEntry(Entry entry, FilterContext context) {
        Subscription subscription = context.getSubscription();
        if (subscription instanceof RawSubscription || context.getMsgMetadata() == null
                || !(subscription.getTopic() instanceof TxnTopic topic)) {
            return FilterResult.ACCEPT;
        }
        if (entry.getPosition().compareTo(topic.getMaxReadPosition()) > 0) {
            return FilterResult.RESCHEDULE; // it was read before, and is due again while the log is read anew
        }
        if (topic.log().rules() == null) {
            return FilterResult.ACCEPT;
        }
        try {
            return shown(topic.log().rules(), entry, context.getMsgMetadata());
        } catch (IOException | RuntimeException error) {
            topic.log().hold(entry.getPosition(), error);
            return FilterResult.RESCHEDULE; // the bound is before it now, so it is not read again
        }
    }

    /** Whether something of an entry up to the bound is visible; if not all is, the entry is rewritten. */
    static FilterResult shown(Rules rules, Entry entry, MessageMetadata metadata) throws IOException {
        if (rules.isVisible(entry.getLedgerId(), entry.getEntryId())) {
            return FilterResult.ACCEPT;
        }
        Packed.Count count = Packed.count(entry.getPosition(), entry.getDataBuffer(), rules);
        if (count.visible == 0 && count.all > 0) {
            return FilterResult.REJECT;
        }
        if (count.partial()) {
            EntryBuffer.replace(entry, Packed.rewrite(entry.getPosition(), entry.getDataBuffer(), metadata, rules));
        }
        return FilterResult.ACCEPT;
    }

    @Override
    public void close() {
    }
}
