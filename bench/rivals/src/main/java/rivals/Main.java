package rivals;

import java.io.File;
import java.lang.management.ManagementFactory;
import java.util.Arrays;
import java.util.Random;
import java.util.concurrent.CountDownLatch;

/**
 * One rival, put to by threads of this JVM: prints "ready", waits for a line, puts, prints one JSON line.
 *
 * <p>Usage: Main NAME FOLDER BODY_BYTES PRODUCERS MESSAGES [sync], the same protocol as bench/producing.py.
 */
public final class Main {
    private static final int WARM_UP_MESSAGES = 200_000;
    private static final int WARM_UP_SYNC_MESSAGES = 1_000;

    public static void main(String[] args) throws Exception {
        File folder = new File(args[1]);
        byte[] body = new byte[Integer.parseInt(args[2])];
        new Random(7).nextBytes(body);
        int producers = Integer.parseInt(args[3]);
        int each = Integer.parseInt(args[4]) / producers;
        boolean sync = args.length > 5 && args[5].equals("sync");
        try (Log log = open(args[0], folder, sync)) {
            put(log, body, producers, (sync ? WARM_UP_SYNC_MESSAGES : WARM_UP_MESSAGES) / producers);
            System.out.println("ready");
            System.in.read();
            long beganCpuNs = cpuNs();
            long beganNs = System.nanoTime();
            long[] tookNs = put(log, body, producers, each);
            double seconds = (System.nanoTime() - beganNs) / 1e9;
            double cpuSeconds = (cpuNs() - beganCpuNs) / 1e9;
            Arrays.sort(tookNs);
            System.out.printf("{\"messages\": %d, \"seconds\": %.6f, \"cpu_seconds\": %.6f, \"p50_us\": %.3f, \"p99_us\": %.3f, "
                    + "\"max_us\": %.3f}%n", tookNs.length, seconds, cpuSeconds, quantileUs(tookNs, 0.5), quantileUs(tookNs, 0.99),
                    quantileUs(tookNs, 1));
        }
        System.exit(0); // threads of the logs may live on
    }

    private static Log open(String name, File folder, boolean sync) throws Exception {
        switch (name) {
            case "rocketmq":
                return new RocketMqLog(folder, sync);
            case "chronicle":
                return new ChronicleLog(folder);
            case "aeron":
                return new AeronLog(folder);
            default:
                throw new IllegalArgumentException("no log of the name " + name);
        }
    }

    /** How long each put took; all producers begin together, and all that was put is in the log at the end. */
    private static long[] put(Log log, byte[] body, int producers, int each) throws Exception {
        long[] tookNs = new long[producers * each];
        CountDownLatch go = new CountDownLatch(1);
        Thread[] threads = new Thread[producers];
        for (int number = 0; number < producers; number++) {
            int own = number;
            Log.Producer producer = log.producer(own);
            threads[number] = new Thread(() -> {
                try {
                    go.await();
                    long before = System.nanoTime();
                    for (int i = own * each; i < (own + 1) * each; i++) {
                        producer.put(body);
                        long now = System.nanoTime();
                        tookNs[i] = now - before;
                        before = now;
                    }
                    producer.end();
                } catch (Exception error) {
                    error.printStackTrace();
                    Runtime.getRuntime().halt(1);
                }
            });
            threads[number].start();
        }
        go.countDown();
        for (Thread thread : threads) {
            thread.join();
        }
        return tookNs;
    }

    private static double quantileUs(long[] sortedNs, double share) {
        return sortedNs[(int) Math.min(sortedNs.length - 1, share * sortedNs.length)] / 1e3;
    }

    private static long cpuNs() {
        return ((com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean()).getProcessCpuTime();
    }
}
