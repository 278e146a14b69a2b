package judge;

import com.alibaba.fastjson.JSONObject;
import java.io.File;
import java.net.InetSocketAddress;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.store.MessageExtBrokerInner;
import org.apache.rocketmq.store.PutMessageResult;

/**
 * The real store as a replication master or slave, which stays open between requests.
 *
 * <p>ha_open starts it in the role of its settings; "master" is the address that a slave follows. ha_put puts
 * made-up messages into a master, one after the other. ha_look tells how far it is. ha_close stops it in good order.
 */
final class Replicating {
    private static final Map<String, RealStore> OPEN = new ConcurrentHashMap<>();
    private static final InetSocketAddress HOST = new InetSocketAddress("127.0.0.1", 10911);

    static Row of(JSONObject request) throws Exception {
        String name = request.getString("store");
        switch (request.getString("command")) {
            case "ha_open":
                return open(name, request);
            case "ha_put":
                return put(OPEN.get(name), request);
            case "ha_look":
                return look(OPEN.get(name));
            default:
                return close(OPEN.remove(name));
        }
    }

    private static Row open(String name, JSONObject request) throws Exception {
        JSONObject settings = request.getJSONObject("settings");
        BrokerConfig broker = new BrokerConfig();
        if ("SLAVE".equals(settings.getString("brokerRole"))) {
            broker.setBrokerId(1); // with id 0 its dispatcher skips half records
        }
        RealStore real = new RealStore(new File(name), settings, null, broker);
        if (!real.store.load()) {
            throw new IllegalStateException("the store was not loaded");
        }
        String master = request.getString("master");
        if (master != null && !master.isEmpty()) {
            real.store.updateHaMasterAddress(master);
        }
        real.store.start();
        OPEN.put(name, real);
        return look(real);
    }

    private static Row put(RealStore real, JSONObject request) {
        Random random = new Random(request.getLongValue("seed"));
        int count = request.getIntValue("count");
        Map<String, Integer> statuses = new TreeMap<>();
        List<Long> ends = new ArrayList<>();
        long[] tookNs = new long[count];
        long beganNs = System.nanoTime();
        for (int i = 0; i < count; i++) {
            byte[] body = new byte[request.getIntValue("bodyBytes")];
            random.nextBytes(body);
            MessageExtBrokerInner message = new MessageExtBrokerInner();
            message.setTopic("Ha");
            message.setQueueId(i % 4);
            message.setBody(body);
            message.setBornTimestamp(System.currentTimeMillis());
            message.setBornHost(HOST);
            message.setStoreHost(HOST);
            MessageAccessor.putProperty(message, MessageConst.PROPERTY_TAGS, "t" + i % 3);
            MessageAccessor.putProperty(message, MessageConst.PROPERTY_KEYS, "k" + i);
            message.setPropertiesString(MessageDecoder.messageProperties2String(message.getProperties()));
            long startNs = System.nanoTime();
            PutMessageResult result = real.store.putMessage(message);
            tookNs[i] = System.nanoTime() - startNs;
            statuses.merge(result.getPutMessageStatus().name(), 1, Integer::sum);
            if (result.isOk()) {
                ends.add(result.getAppendMessageResult().getWroteOffset() + result.getAppendMessageResult().getWroteBytes());
            }
        }
        double seconds = (System.nanoTime() - beganNs) / 1e9;
        Arrays.sort(tookNs);
        return look(real).with("statuses", statuses).with("okEnd", ends.isEmpty() ? -1 : ends.get(ends.size() - 1))
            .with("seconds", seconds).with("p50Us", count == 0 ? 0 : tookNs[count / 2] / 1000.0)
            .with("p99Us", count == 0 ? 0 : tookNs[count * 99 / 100] / 1000.0);
    }

    private static Row look(RealStore real) {
        return Row.of("minPhy", real.store.getMinPhyOffset()).with("maxPhy", real.store.getMaxPhyOffset())
            .with("dispatchBehind", real.store.dispatchBehindBytes())
            .with("pushedToSlave", real.store.getHaService().getPush2SlaveMaxOffset().get())
            .with("connections", real.store.getHaService().getConnectionCount().get());
    }

    private static Row close(RealStore real) throws Exception {
        real.awaitDispatch();
        Row answer = look(real).with("facts", Facts.of(real, false));
        real.store.shutdown();
        return answer.with("log", StoreLog.troubles());
    }
}
