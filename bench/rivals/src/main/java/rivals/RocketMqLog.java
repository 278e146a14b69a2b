package rivals;

import java.io.File;
import java.net.InetSocketAddress;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.MessageExtBrokerInner;
import org.apache.rocketmq.store.PutMessageStatus;
import org.apache.rocketmq.store.config.FlushDiskType;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/** The published RocketMQ store with its defaults; segments as large as those of pyengine's benchmarks. */
final class RocketMqLog implements Log {
    private static final InetSocketAddress HOST = new InetSocketAddress("127.0.0.1", 10911);

    private final DefaultMessageStore store;

    RocketMqLog(File folder, boolean sync) throws Exception {
        MessageStoreConfig config = new MessageStoreConfig();
        config.setStorePathRootDir(folder.getPath());
        config.setStorePathCommitLog(new File(folder, "commitlog").getPath());
        config.setMappedFileSizeCommitLog(1 << 28);
        config.setFlushDiskType(sync ? FlushDiskType.SYNC_FLUSH : FlushDiskType.ASYNC_FLUSH);
        config.setHaListenPort(0);
        store = new DefaultMessageStore(config, new BrokerStatsManager("bench", false), null, new BrokerConfig());
        if (!store.load()) {
            throw new IllegalStateException("the store was not loaded");
        }
        store.start();
    }

    @Override
    public Producer producer(int number) {
        return body -> {
            MessageExtBrokerInner message = new MessageExtBrokerInner();
            message.setTopic("bench");
            message.setQueueId(number);
            message.setBody(body);
            message.setBornTimestamp(System.currentTimeMillis());
            message.setBornHost(HOST);
            message.setStoreHost(HOST);
            message.setPropertiesString("");
            PutMessageStatus status = store.putMessage(message).getPutMessageStatus();
            if (status != PutMessageStatus.PUT_OK) {
                throw new IllegalStateException(status.name());
            }
        };
    }

    @Override
    public void close() {
        store.shutdown();
    }
}
