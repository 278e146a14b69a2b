package judge;

import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.TreeSet;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.GetMessageResult;
import org.apache.rocketmq.store.GetMessageStatus;
import org.apache.rocketmq.store.QueryMessageResult;

/** Messages as the store serves them: through their queues, by time, by key. */
final class ReadBack {
    private static final int PULL = 32;
    private static final int QUERY_MAX = 64;

    private final DefaultMessageStore store;
    final List<Row> messages = new ArrayList<>();
    final List<Row> byTime = new ArrayList<>();

    ReadBack(RealStore real) {
        store = real.store;
        for (Row queue : Facts.queues(real, false)) {
            String topic = (String) queue.get("topic");
            int id = (Integer) queue.get("queueId");
            long min = (Long) queue.get("min");
            long max = (Long) queue.get("max");
            sampleTimes(topic, id, pull(topic, id, min, max));
            edges(topic, id, min, max);
        }
    }

    /** Reads one queue from end to end; the store times of what came. */
    private List<Long> pull(String topic, int id, long min, long max) {
        List<Long> storeTimes = new ArrayList<>();
        long at = min;
        while (at < max) {
            GetMessageResult got = store.getMessage("judge", topic, id, at, PULL, null);
            for (ByteBuffer bytes : got.getMessageBufferList()) {
                byte[] whole = Row.take(bytes.duplicate(), bytes.remaining());
                MessageExt message = MessageDecoder.decode(bytes.duplicate(), true, false);
                if (message == null) {
                    messages.add(Row.of("topic", topic).with("queueId", id).with("undecodable", true).with("size", whole.length));
                    continue;
                }
                messages.add(message(topic, message, whole));
                storeTimes.add(message.getStoreTimestamp());
            }
            got.release();
            if (got.getStatus() != GetMessageStatus.FOUND) {
                messages.add(Row.of("topic", topic).with("queueId", id).with("status", got.getStatus().name())
                    .with("at", at).with("next", got.getNextBeginOffset()));
            }
            if (got.getNextBeginOffset() <= at) {
                break;
            }
            at = got.getNextBeginOffset();
        }
        return storeTimes;
    }

    private static Row message(String queue, MessageExt message, byte[] whole) {
        byte[] body = message.getBody() == null ? new byte[0] : message.getBody();
        Map<String, String> properties = message.getProperties() == null ? Map.of() : message.getProperties();
        return Row.of("topic", message.getTopic()).with("queue", queue).with("queueId", message.getQueueId())
            .with("queueOffset", message.getQueueOffset()).with("phy", message.getCommitLogOffset())
            .with("size", message.getStoreSize())
            .with("tags", message.getTags()).with("keys", message.getKeys()).with("uniq", message.getProperty("UNIQ_KEY"))
            .with("props", new TreeMap<>(properties)).with("flag", message.getFlag()).with("sysFlag", message.getSysFlag())
            .with("born", message.getBornTimestamp()).with("storeTs", message.getStoreTimestamp())
            .with("bornHost", host(message.getBornHost())).with("storeHost", host(message.getStoreHost()))
            .with("reconsume", message.getReconsumeTimes()).with("prepared", message.getPreparedTransactionOffset())
            .with("bodyLen", body.length).with("bodySha", Row.sha256(body)).with("crc", message.getBodyCRC())
            .with("msgId", message.getMsgId()).with("recSha", Row.sha256(whole));
    }

    private static String host(SocketAddress address) {
        InetSocketAddress inet = (InetSocketAddress) address;
        return LogRecords.hostText(inet.getAddress().getAddress(), inet.getPort());
    }

    /** getOffsetInQueueByTime before, at, between and after about six messages of the queue. */
    private void sampleTimes(String topic, int id, List<Long> times) {
        if (times.isEmpty()) {
            return;
        }
        long first = times.get(0);
        long last = times.get(times.size() - 1);
        TreeSet<Long> asked = new TreeSet<>(List.of(0L, first - 1, first, last, last + 1000));
        int step = Math.max(1, times.size() / 6);
        for (int i = 0; i + 1 < times.size(); i += step) {
            long middle = (times.get(i) + times.get(i + 1)) / 2;
            asked.addAll(List.of(times.get(i), middle, middle + 1));
        }
        for (long time : asked) {
            byTime.add(Row.of("topic", topic).with("queueId", id).with("ts", time)
                .with("offset", store.getOffsetInQueueByTime(topic, id, time)));
        }
    }

    /** The statuses of getMessage around both ends of the queue. */
    private void edges(String topic, int id, long min, long max) {
        List<Row> rows = new ArrayList<>();
        for (long at : new long[] {-1, min - 1, max, max + 1, max + 1000}) {
            GetMessageResult got = store.getMessage("judge", topic, id, at, PULL, null);
            rows.add(Row.of("at", at).with("status", got.getStatus().name()).with("next", got.getNextBeginOffset())
                .with("min", got.getMinOffset()).with("max", got.getMaxOffset()).with("found", got.getMessageCount()));
            got.release();
        }
        byTime.add(Row.of("topic", topic).with("queueId", id).with("edges", rows));
    }

    /** Every distinct topic and key of the log, asked of the index. */
    List<Row> queries(List<Row> records) {
        TreeMap<String, TreeSet<String>> keysOf = new TreeMap<>();
        for (Row record : records) {
            if (record.get("props") == null) {
                continue;
            }
            TreeSet<String> keys = keysOf.computeIfAbsent((String) record.get("topic"), ignored -> new TreeSet<>());
            Map<String, String> properties = MessageDecoder.string2messageProperties((String) record.get("props"));
            for (String key : properties.getOrDefault("KEYS", "").split(" ")) {
                if (!key.isEmpty()) {
                    keys.add(key);
                }
            }
            if (properties.containsKey("UNIQ_KEY")) {
                keys.add(properties.get("UNIQ_KEY"));
            }
        }
        List<Row> rows = new ArrayList<>();
        keysOf.forEach((topic, keys) -> keys.forEach(key -> rows.add(query(topic, key))));
        return rows;
    }

    private Row query(String topic, String key) {
        QueryMessageResult got = store.queryMessage(topic, key, QUERY_MAX, 0, Long.MAX_VALUE);
        List<Long> physical = new ArrayList<>();
        for (ByteBuffer bytes : got.getMessageBufferList()) {
            physical.add(bytes.getLong(28));
        }
        got.release();
        return Row.of("topic", topic).with("key", key).with("phys", physical)
            .with("lastTs", got.getIndexLastUpdateTimestamp()).with("lastPhy", got.getIndexLastUpdatePhyoffset());
    }
}
