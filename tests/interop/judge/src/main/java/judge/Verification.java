package judge;

import com.alibaba.fastjson.JSONObject;
import java.io.File;
import java.util.List;

/**
 * Opens a store and tells everything that can be read from it.
 *
 * <p>As a slave, so that nothing is appended and no delayed message is delivered, but with a master's answers about
 * offsets out of range.
 */
final class Verification {
    static Row of(JSONObject request) throws Exception {
        File root = new File(request.getString("store"));
        JSONObject settings = new JSONObject(true);
        settings.putAll(request.getJSONObject("settings"));
        if (settings.putIfAbsent("brokerRole", "SLAVE") == null) {
            settings.putIfAbsent("offsetCheckInSlave", "true");
        }
        Row before = Facts.onDisk(root).with("index", Facts.indexHeaders(root));
        boolean crashed = (Boolean) before.get("abort");
        Row answer = Row.of("store", "rocketmq-store 4.9.8").with("config", settings).with("before", before)
            .with("path", crashed ? "abnormal" : "normal");

        RealStore real = new RealStore(root, settings, null);
        boolean loaded = real.store.load();
        answer.with("loadOk", loaded);
        if (loaded) {
            answer.with("afterLoad", Facts.of(real, false));
            real.store.start();
            real.awaitDispatch();
            List<Row> records = LogRecords.all(real);
            ReadBack readBack = new ReadBack(real);
            answer.with("facts", Facts.of(real, true)).with("records", records).with("messages", readBack.messages)
                .with("byTime", readBack.byTime).with("queries", readBack.queries(records))
                .with("indexAfter", Facts.indexHeaders(root));
            real.store.shutdown();
            answer.with("after", Facts.onDisk(root));
        }
        return answer.with("log", StoreLog.troubles());
    }
}
