package judge;

import java.io.File;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import org.apache.rocketmq.store.ConsumeQueue;
import org.apache.rocketmq.store.ConsumeQueueExt;
import org.apache.rocketmq.store.SelectMappedBufferResult;
import org.apache.rocketmq.store.StoreCheckpoint;

/** Positions, checkpoint, queues with their entries, index headers: what the store holds, without its messages. */
final class Facts {
    static Row of(RealStore real, boolean withEntries) throws Exception {
        StoreCheckpoint checkpoint = real.store.getStoreCheckpoint();
        Row times = Row.of("physic", checkpoint.getPhysicMsgTimestamp())
            .with("logics", checkpoint.getLogicsMsgTimestamp())
            .with("index", checkpoint.getIndexMsgTimestamp())
            .with("min", checkpoint.getMinTimestamp())
            .with("minIndex", checkpoint.getMinTimestampIndex());
        return Row.of("minPhy", real.store.getMinPhyOffset())
            .with("maxPhy", real.store.getMaxPhyOffset())
            .with("flushedWhere", real.segments().getFlushedWhere())
            .with("committedWhere", real.segments().getCommittedWhere())
            .with("behind", real.store.dispatchBehindBytes())
            .with("flagBits", real.store.getRunningFlags().getFlagBits())
            .with("checkpoint", times)
            .with("queues", queues(real, withEntries));
    }

    /** Every queue that holds something, by topic and number. */
    static List<Row> queues(RealStore real, boolean withEntries) {
        List<Row> rows = new ArrayList<>();
        new TreeMap<>(real.store.getConsumeQueueTable()).forEach((topic, byId) -> new TreeMap<>(byId).forEach((id, queue) -> {
            if (queue.getMaxOffsetInQueue() == 0) {
                return;
            }
            Row row = Row.of("topic", topic).with("queueId", id)
                .with("min", queue.getMinOffsetInQueue())
                .with("max", queue.getMaxOffsetInQueue())
                .with("maxPhy", queue.getMaxPhysicOffset());
            if (withEntries) {
                List<Object> entries = new ArrayList<>();
                for (long at = queue.getMinOffsetInQueue(); at < queue.getMaxOffsetInQueue(); at++) {
                    entries.add(entry(queue, at));
                }
                row.with("entries", entries);
            }
            rows.add(row);
        }));
        return rows;
    }

    private static Object entry(ConsumeQueue queue, long at) {
        SelectMappedBufferResult found = queue.getIndexBuffer(at);
        if (found == null) {
            return null;
        }
        try {
            ByteBuffer bytes = found.getByteBuffer();
            long physical = bytes.getLong();
            int size = bytes.getInt();
            long code = bytes.getLong();
            ConsumeQueueExt.CqExtUnit unit = queue.isExtAddr(code) ? queue.getExt(code) : null;
            if (unit == null) {
                return Arrays.asList(physical, size, code);
            }
            byte[] bitMap = unit.getFilterBitMap();
            return Row.of("phy", physical).with("size", size).with("raw", code).with("tagsCode", unit.getTagsCode())
                .with("storeTs", unit.getMsgStoreTime()).with("bitMap", bitMap == null ? null : Row.hex(bitMap));
        } finally {
            found.release();
        }
    }

    /** What the directory itself says: the crash mark, the checkpoint's three times, the index headers. */
    static Row onDisk(File root) throws IOException {
        File checkpoint = new File(root, "checkpoint");
        Row times = null;
        if (checkpoint.exists()) {
            ByteBuffer bytes = ByteBuffer.wrap(Files.readAllBytes(checkpoint.toPath()));
            times = Row.of("len", bytes.capacity());
            if (bytes.capacity() >= 24) {
                times.with("physic", bytes.getLong(0)).with("logics", bytes.getLong(8)).with("index", bytes.getLong(16));
            }
        }
        return Row.of("abort", new File(root, "abort").exists()).with("checkpoint", times);
    }

    static List<Row> indexHeaders(File root) throws IOException {
        List<Row> rows = new ArrayList<>();
        File[] files = new File(root, "index").listFiles();
        Arrays.sort(files = files == null ? new File[0] : files);
        for (File file : files) {
            try (java.io.RandomAccessFile in = new java.io.RandomAccessFile(file, "r")) {
                byte[] header = new byte[40];
                if (in.length() < header.length) {
                    continue;
                }
                in.readFully(header);
                ByteBuffer bytes = ByteBuffer.wrap(header);
                rows.add(Row.of("file", file.getName())
                    .with("beginTs", bytes.getLong()).with("endTs", bytes.getLong())
                    .with("beginPhy", bytes.getLong()).with("endPhy", bytes.getLong())
                    .with("slotCount", bytes.getInt()).with("indexCount", bytes.getInt()));
            }
        }
        return rows;
    }
}
