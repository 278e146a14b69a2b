package rivals;

import java.io.File;
import net.openhft.chronicle.queue.ChronicleQueue;
import net.openhft.chronicle.queue.ExcerptAppender;
import net.openhft.chronicle.queue.impl.single.SingleChronicleQueueBuilder;

/** Chronicle Queue with its defaults. It promises nothing about the disk. */
final class ChronicleLog implements Log {
    private final ChronicleQueue queue;

    ChronicleLog(File folder) {
        queue = SingleChronicleQueueBuilder.single(folder).build();
    }

    @Override
    public Producer producer(int number) {
        return new Producer() {
            private ExcerptAppender appender; // belongs to the thread that makes it

            @Override
            public void put(byte[] body) {
                if (appender == null) {
                    appender = queue.createAppender();
                }
                appender.writeBytes(bytes -> bytes.write(body));
            }
        };
    }

    @Override
    public void close() {
        queue.close();
    }
}
