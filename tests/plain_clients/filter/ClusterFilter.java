import io.netty.buffer.ByteBuf;
import java.io.IOException;
import java.io.UncheckedIOException;
import org.apache.bookkeeper.mledger.Entry;
import org.apache.pulsar.broker.service.plugin.EntryFilter;
import org.apache.pulsar.broker.service.plugin.FilterContext;
import org.apache.pulsar.common.api.proto.CompressionType;
import org.apache.pulsar.common.api.proto.MessageMetadata;
import org.apache.pulsar.common.api.proto.SingleMessageMetadata;
import org.apache.pulsar.common.protocol.Commands;

/** An entry filter of a cluster: it hides readable batches with a message that has the property `unwanted`. */
public final class ClusterFilter implements EntryFilter {
    @Override
    public FilterResult filterEntry(Entry entry, FilterContext context) {
        ByteBuf data = entry.getDataBuffer().duplicate();
        MessageMetadata metadata = Commands.parseMessageMetadata(data);
        try {
            boolean readable = metadata.hasNumMessagesInBatch() && metadata.getEncryptionKeysCount() == 0
                    && metadata.getCompression() == CompressionType.NONE;
            for (int i = 0, n = readable ? metadata.getNumMessagesInBatch() : 0; i < n; i++) {
                SingleMessageMetadata single = new SingleMessageMetadata();
                Commands.deSerializeSingleMessageInBatch(data, single, i, n).release();
                if (single.getPropertiesList().stream().anyMatch(one -> one.getKey().equals("unwanted"))) {
                    return FilterResult.REJECT;
                }
            }
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
        return FilterResult.ACCEPT;
    }

    @Override
    public void close() {
    }
}
