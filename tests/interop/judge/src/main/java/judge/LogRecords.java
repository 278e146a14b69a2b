package judge;

import java.net.InetAddress;
import java.net.UnknownHostException;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import org.apache.rocketmq.store.SelectMappedBufferResult;

/** The commit log record by record, taken apart here and not by the store's decoder. */
final class LogRecords {
    private static final int MESSAGE = 0xDAA320A7;
    private static final int BLANK = 0xCBD43194;
    private static final int SMALLEST = 91;

    /** From the log's minimum to its maximum; the last row says "unreadable" if something is no record. */
    static List<Row> all(RealStore real) {
        List<Row> rows = new ArrayList<>();
        long segmentBytes = real.store.getMessageStoreConfig().getMappedFileSizeCommitLog();
        long end = real.store.getMaxPhyOffset();
        long at = Math.max(0, real.store.getMinPhyOffset());
        while (at < end) {
            Row row = real.store.getMinPhyOffset() < 0 ? null : one(real, at);
            if (row == null) {
                rows.add(Row.of("phy", at).with("unreadable", true));
                break;
            }
            rows.add(row);
            at = row.containsKey("blank") ? at - at % segmentBytes + segmentBytes : at + (int) row.get("size");
        }
        return rows;
    }

    private static Row one(RealStore real, long at) {
        SelectMappedBufferResult found = real.store.getCommitLog().getData(at);
        if (found == null) {
            return null;
        }
        try {
            return parse(found.getByteBuffer(), at);
        } finally {
            found.release();
        }
    }

    private static Row parse(ByteBuffer segment, long at) {
        if (segment.remaining() < 8) {
            return null;
        }
        int size = segment.getInt(segment.position());
        int magic = segment.getInt(segment.position() + 4);
        if (magic == BLANK) {
            return Row.of("phy", at).with("size", size).with("blank", true);
        }
        if (magic != MESSAGE || size < SMALLEST || size > segment.remaining()) {
            return null;
        }
        byte[] whole = Row.take(segment, size);
        ByteBuffer record = ByteBuffer.wrap(whole, 8, size - 8);
        Row row = Row.of("phy", at).with("size", size)
            .with("crc", record.getInt()).with("queueId", record.getInt()).with("flag", record.getInt())
            .with("queueOffset", record.getLong()).with("physField", record.getLong());
        int sysFlag = record.getInt();
        row.with("sysFlag", sysFlag).with("born", record.getLong())
            .with("bornHost", host(record, (sysFlag & 0x10) != 0))
            .with("storeTs", record.getLong())
            .with("storeHost", host(record, (sysFlag & 0x20) != 0))
            .with("reconsume", record.getInt()).with("prepared", record.getLong());
        byte[] body = Row.take(record, record.getInt());
        String topic = text(record, record.get() & 0xff);
        String properties = text(record, record.getShort() & 0xffff);
        return row.with("bodyLen", body.length).with("bodySha", Row.sha256(body)).with("topic", topic)
            .with("props", properties).with("recSha", Row.sha256(whole));
    }

    private static String text(ByteBuffer record, int length) {
        return new String(Row.take(record, length), StandardCharsets.UTF_8);
    }

    private static String host(ByteBuffer record, boolean six) {
        return hostText(Row.take(record, six ? 16 : 4), record.getInt());
    }

    static String hostText(byte[] address, int port) {
        try {
            String text = InetAddress.getByAddress(address).getHostAddress();
            return (address.length == 16 ? "[" + text + "]" : text) + ":" + port;
        } catch (UnknownHostException impossible) {
            throw new IllegalStateException(impossible);
        }
    }
}
