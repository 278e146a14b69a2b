package judge;

import java.io.File;
import java.lang.reflect.Field;
import java.lang.reflect.Method;
import java.util.Map;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.SystemClock;
import org.apache.rocketmq.store.CommitLog;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.MappedFileQueue;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/** DefaultMessageStore over one directory, quiet: it deletes nothing by age and serves a port of the system's choice. */
final class RealStore {
    private static final long DISPATCH_TIMEOUT_MS = 30_000;

    final DefaultMessageStore store;
    final File root;
    /** Stalled at the time that is set; null: the store runs on real time. */
    final StalledClock clock;

    /** The store clock that a replay sets by hand. */
    static final class StalledClock extends SystemClock {
        volatile long nowMs;

        @Override public long now() {
            return nowMs;
        }
    }

    RealStore(File root, Map<String, Object> settings, StalledClock clock) throws Exception {
        this(root, settings, clock, new BrokerConfig());
    }

    RealStore(File root, Map<String, Object> settings, StalledClock clock, BrokerConfig broker) throws Exception {
        this.root = root;
        this.clock = clock;
        MessageStoreConfig config = new MessageStoreConfig();
        config.setStorePathRootDir(root.getPath());
        config.setStorePathCommitLog(new File(root, "commitlog").getPath());
        config.setHaListenPort(0);
        config.setFileReservedTime(1_000_000);
        config.setCleanFileForciblyEnable(false);
        for (Map.Entry<String, Object> setting : settings.entrySet()) {
            apply(config, setting.getKey(), String.valueOf(setting.getValue()));
        }
        synchronized (RealStore.class) { // its constructor fills a static TreeMap
            store = new DefaultMessageStore(config, new BrokerStatsManager("judge", false),
                (a, b, c, d, e, f, g) -> { }, broker);
        }
        if (clock != null) {
            field(DefaultMessageStore.class, "systemClock").set(store, clock);
        }
    }

    /** Calls the setter of a setting by its RocketMQ name. */
    @SuppressWarnings({"unchecked", "rawtypes"})
    private static void apply(MessageStoreConfig config, String name, String value) throws ReflectiveOperationException {
        String setter = "set" + name.substring(0, 1).toUpperCase() + name.substring(1);
        for (Method method : MessageStoreConfig.class.getMethods()) {
            if (method.getName().equals(setter) && method.getParameterCount() == 1) {
                Class<?> type = method.getParameterTypes()[0];
                Object parsed = type == int.class ? (Object) Integer.valueOf(value)
                    : type == long.class ? Long.valueOf(value)
                    : type == boolean.class ? Boolean.valueOf(value)
                    : type.isEnum() ? Enum.valueOf((Class) type, value) : value;
                if (type.isPrimitive() || type.isInstance(parsed)) {
                    method.invoke(config, parsed);
                    return;
                }
            }
        }
        throw new IllegalArgumentException("MessageStoreConfig has no setting " + name);
    }

    private static Field field(Class<?> owner, String name) throws NoSuchFieldException {
        Field field = owner.getDeclaredField(name);
        field.setAccessible(true);
        return field;
    }

    MappedFileQueue segments() throws ReflectiveOperationException {
        return (MappedFileQueue) field(CommitLog.class, "mappedFileQueue").get(store.getCommitLog());
    }

    /** Waits until the queues and the index have caught up with the log. */
    void awaitDispatch() throws InterruptedException {
        long deadline = System.currentTimeMillis() + DISPATCH_TIMEOUT_MS;
        while (store.dispatchBehindBytes() > 0) {
            if (System.currentTimeMillis() > deadline) {
                throw new IllegalStateException("dispatch stays " + store.dispatchBehindBytes() + " bytes behind");
            }
            Thread.sleep(2);
        }
    }
}
