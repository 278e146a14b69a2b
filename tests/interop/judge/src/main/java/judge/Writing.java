package judge;

import com.alibaba.fastjson.JSONObject;
import java.io.File;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.util.ArrayList;
import java.util.Base64;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageExtBatch;
import org.apache.rocketmq.store.AppendMessageResult;
import org.apache.rocketmq.store.MessageExtBrokerInner;
import org.apache.rocketmq.store.PutMessageResult;

/**
 * Opens a store as a master and puts messages into it: a new store, or to go on where another engine stopped.
 *
 * <p>A put is a row of a manifest with its body in "body" (base64, null for none) and "batch" true for an encoded batch.
 * Where puts carry "clock" the store's clock has that value, so that the bytes depend on the puts alone.
 */
final class Writing {
    static Row of(JSONObject request) throws Exception {
        File root = new File(request.getString("store"));
        List<JSONObject> puts = request.getJSONArray("puts").toJavaList(JSONObject.class);
        RealStore.StalledClock clock = null;
        if (!puts.isEmpty() && puts.get(0).containsKey("clock")) {
            clock = new RealStore.StalledClock();
            clock.nowMs = puts.get(0).getLongValue("clock");
        }
        RealStore real = new RealStore(root, request.getJSONObject("settings"), clock);
        Row answer = Row.of("loadOk", real.store.load());
        if ((Boolean) answer.get("loadOk")) {
            real.store.start();
            List<Row> results = new ArrayList<>();
            for (JSONObject put : puts) {
                if (clock != null) {
                    clock.nowMs = put.getLongValue("clock");
                }
                results.add(result(perform(real, put)));
            }
            real.awaitDispatch();
            List<Row> records = LogRecords.all(real);
            ReadBack readBack = new ReadBack(real);
            answer.with("puts", results).with("facts", Facts.of(real, true)).with("records", records)
                .with("messages", readBack.messages).with("queries", readBack.queries(records));
            real.store.shutdown();
            answer.with("after", Facts.onDisk(root));
        }
        return answer.with("log", StoreLog.troubles());
    }

    private static PutMessageResult perform(RealStore real, JSONObject put) throws Exception {
        String properties = put.getString("propsIn");
        byte[] body = put.getString("body") == null ? null : Base64.getDecoder().decode(put.getString("body"));
        if (put.getBooleanValue("batch")) {
            MessageExtBatch batch = new MessageExtBatch();
            fill(batch, put, body, properties);
            return real.store.putMessages(batch);
        }
        MessageExtBrokerInner message = new MessageExtBrokerInner();
        fill(message, put, body, properties);
        message.setPropertiesString(properties);
        return real.store.putMessage(message);
    }

    private static void fill(MessageExt message, JSONObject put, byte[] body, String properties) throws Exception {
        Map<String, String> parsed = MessageDecoder.string2messageProperties(properties);
        MessageAccessor.setProperties(message, parsed);
        message.setTopic(put.getString("topic"));
        message.setQueueId(put.getIntValue("queueId"));
        message.setBody(body);
        message.setFlag(put.getIntValue("flag"));
        message.setSysFlag(put.getIntValue("sysFlagIn"));
        message.setBornTimestamp(put.getLongValue("born"));
        message.setBornHost(host(put.getString("bornHost")));
        message.setStoreHost(host(put.getString("storeHost")));
        message.setReconsumeTimes(put.getIntValue("reconsume"));
        message.setPreparedTransactionOffset(put.getLongValue("prepared"));
    }

    private static InetSocketAddress host(String text) throws Exception {
        int colon = text.lastIndexOf(':');
        String address = text.substring(0, colon).replace("[", "").replace("]", "");
        return new InetSocketAddress(InetAddress.getByName(address), Integer.parseInt(text.substring(colon + 1)));
    }

    private static Row result(PutMessageResult put) {
        Row row = Row.of("status", put.getPutMessageStatus().name());
        AppendMessageResult append = put.getAppendMessageResult();
        if (append != null) {
            row.with("append", append.getStatus().name()).with("phy", append.getWroteOffset())
                .with("size", append.getWroteBytes())
                .with("queueOffset", append.getLogicsOffset()).with("storeTs", append.getStoreTimestamp())
                .with("msgId", append.getMsgId()).with("msgNum", append.getMsgNum());
        }
        return row;
    }
}
