package judge;

import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import org.apache.rocketmq.logging.InternalLogger;
import org.apache.rocketmq.logging.InternalLoggerFactory;

/**
 * Keeps the store's own warnings and errors, request by request.
 *
 * <p>The store starts threads of its own; they inherit the list of the request that opened it.
 */
final class StoreLog extends InternalLoggerFactory {
    private static final int LINES_MAX = 40;
    private static final int LINE_CHARACTERS_MAX = 300;
    private static final InheritableThreadLocal<List<String>> LINES = new InheritableThreadLocal<>();

    static void install() {
        new StoreLog().doRegister();
        setCurrentLoggerType("judge");
    }

    static void begin() {
        LINES.set(Collections.synchronizedList(new ArrayList<>()));
    }

    static List<String> troubles() {
        List<String> lines = LINES.get();
        synchronized (lines) {
            return new ArrayList<>(lines.subList(0, Math.min(LINES_MAX, lines.size())));
        }
    }

    @Override protected InternalLogger getLoggerInstance(String name) {
        return new Logger(name);
    }

    @Override protected String getLoggerType() {
        return "judge";
    }

    @Override protected void shutdown() {
    }

    private static void keep(String level, String format, Object... values) {
        List<String> lines = LINES.get();
        if (lines == null || lines.size() >= LINES_MAX) {
            return;
        }
        StringBuilder line = new StringBuilder(level).append(' ');
        int from = 0;
        for (Object value : values) {
            int hole = format == null ? -1 : format.indexOf("{}", from);
            if (hole < 0) {
                line.append(format == null ? "" : format.substring(from)).append(" | ").append(value);
                from = format == null ? 0 : format.length();
            } else {
                line.append(format, from, hole).append(value);
                from = hole + 2;
            }
        }
        line.append(format == null ? "" : format.substring(from));
        lines.add(line.substring(0, Math.min(LINE_CHARACTERS_MAX, line.length())));
    }

    private static final class Logger implements InternalLogger {
        private final String name;

        Logger(String name) {
            this.name = name;
        }

        @Override public String getName() {
            return name;
        }

        @Override public void debug(String text) {
        }

        @Override public void debug(String format, Object a) {
        }

        @Override public void debug(String format, Object a, Object b) {
        }

        @Override public void debug(String format, Object... values) {
        }

        @Override public void debug(String text, Throwable thrown) {
        }

        @Override public void info(String text) {
        }

        @Override public void info(String format, Object a) {
        }

        @Override public void info(String format, Object a, Object b) {
        }

        @Override public void info(String format, Object... values) {
        }

        @Override public void info(String text, Throwable thrown) {
        }

        @Override public void warn(String text) {
            keep("WARN", text);
        }

        @Override public void warn(String format, Object a) {
            keep("WARN", format, a);
        }

        @Override public void warn(String format, Object a, Object b) {
            keep("WARN", format, a, b);
        }

        @Override public void warn(String format, Object... values) {
            keep("WARN", format, values);
        }

        @Override public void warn(String text, Throwable thrown) {
            keep("WARN", text, thrown);
        }

        @Override public void error(String text) {
            keep("ERROR", text);
        }

        @Override public void error(String format, Object a) {
            keep("ERROR", format, a);
        }

        @Override public void error(String format, Object a, Object b) {
            keep("ERROR", format, a, b);
        }

        @Override public void error(String format, Object... values) {
            keep("ERROR", format, values);
        }

        @Override public void error(String text, Throwable thrown) {
            keep("ERROR", text, thrown);
        }
    }
}
