package judge;

import com.alibaba.fastjson.JSONObject;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentMap;
import org.apache.rocketmq.common.ConfigManager;
import org.apache.rocketmq.remoting.protocol.RemotingSerializable;

/**
 * Reads config/consumerOffset.json as the broker's ConsumerOffsetManager does, and writes it back.
 *
 * <p>Loading, the fall to the backup, decoding and persisting are RocketMQ's own (ConfigManager,
 * RemotingSerializable); only the field is declared here, as the broker declares it.
 */
public class GroupOffsets extends ConfigManager {
    private transient String path;
    private ConcurrentMap<String, ConcurrentMap<Integer, Long>> offsetTable = new ConcurrentHashMap<>();

    /** {"path", "commit": {"topic@group": {"queueId": offset}}} gives the table as it was loaded. */
    static Row of(JSONObject request) {
        GroupOffsets offsets = new GroupOffsets();
        offsets.path = request.getString("path");
        boolean loaded = offsets.load();
        Row answer = Row.of("loaded", loaded);
        TreeMap<String, Object> table = new TreeMap<>();
        offsets.offsetTable.forEach((key, queues) -> {
            TreeMap<String, Object> row = new TreeMap<>();
            queues.forEach((queueId, offset) -> row.put(String.valueOf(queueId), offset));
            table.put(key, row);
        });
        answer.with("offsetTable", table);
        JSONObject commit = request.getJSONObject("commit");
        if (commit != null) {
            commit.forEach((key, queues) -> ((JSONObject) queues).forEach((queueId, offset) ->
                offsets.offsetTable.computeIfAbsent(key, absent -> new ConcurrentHashMap<>())
                    .put(Integer.valueOf(queueId), ((Number) offset).longValue())));
            offsets.persist();
        }
        return answer;
    }

    @Override
    public String encode() {
        return encode(false);
    }

    @Override
    public String configFilePath() {
        return path;
    }

    @Override
    public void decode(String text) {
        if (text != null) {
            GroupOffsets read = RemotingSerializable.fromJson(text, GroupOffsets.class);
            if (read != null) {
                offsetTable = read.offsetTable;
            }
        }
    }

    @Override
    public String encode(boolean prettyFormat) {
        return RemotingSerializable.toJson(this, prettyFormat);
    }

    public ConcurrentMap<String, ConcurrentMap<Integer, Long>> getOffsetTable() {
        return offsetTable;
    }

    public void setOffsetTable(ConcurrentMap<String, ConcurrentMap<Integer, Long>> offsetTable) {
        this.offsetTable = offsetTable;
    }
}
