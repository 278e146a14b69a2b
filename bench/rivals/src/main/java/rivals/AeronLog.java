package rivals;

import io.aeron.Aeron;
import io.aeron.CommonContext;
import io.aeron.ExclusivePublication;
import io.aeron.archive.Archive;
import io.aeron.archive.ArchiveThreadingMode;
import io.aeron.archive.ArchivingMediaDriver;
import io.aeron.archive.client.AeronArchive;
import io.aeron.archive.status.RecordingPos;
import io.aeron.driver.MediaDriver;
import io.aeron.driver.ThreadingMode;
import java.io.File;
import org.agrona.concurrent.UnsafeBuffer;
import org.agrona.concurrent.status.CountersReader;

/** Aeron Archive over IPC, driver and archive in this JVM. A put is an offer; end() waits until it is recorded. */
final class AeronLog implements Log {
    private static final String CHANNEL = "aeron:ipc?term-length=64m";

    private final ArchivingMediaDriver driver;
    private final AeronArchive archive;

    AeronLog(File folder) {
        String directory = CommonContext.generateRandomDirName();
        String control = "aeron:ipc?term-length=64k";
        driver = ArchivingMediaDriver.launch(
            new MediaDriver.Context().aeronDirectoryName(directory).threadingMode(ThreadingMode.SHARED)
                .dirDeleteOnStart(true).dirDeleteOnShutdown(true),
            new Archive.Context().aeronDirectoryName(directory).archiveDir(folder).threadingMode(ArchiveThreadingMode.SHARED)
                .controlChannel("aeron:udp?endpoint=localhost:0").localControlChannel(control)
                .replicationChannel("aeron:udp?endpoint=localhost:0").deleteArchiveOnStart(true));
        archive = AeronArchive.connect(new AeronArchive.Context().aeronDirectoryName(directory)
            .controlRequestChannel(control).controlResponseChannel(control));
    }

    @Override
    public Producer producer(int number) {
        ExclusivePublication publication = archive.addRecordedExclusivePublication(CHANNEL, 1000 + number);
        Aeron aeron = archive.context().aeron();
        UnsafeBuffer buffer = new UnsafeBuffer(new byte[0]);
        return new Producer() {
            @Override
            public void put(byte[] body) {
                buffer.wrap(body);
                while (publication.offer(buffer) < 0) {
                    Thread.onSpinWait();
                }
            }

            @Override
            public void end() {
                CountersReader counters = aeron.countersReader();
                int counter = RecordingPos.findCounterIdBySession(counters, publication.sessionId(), archive.archiveId());
                while (counters.getCounterValue(counter) < publication.position()) {
                    Thread.onSpinWait();
                }
            }
        };
    }

    @Override
    public void close() {
        archive.close();
        driver.close();
    }
}
