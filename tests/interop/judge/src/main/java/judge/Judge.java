package judge;

import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONObject;
import com.alibaba.fastjson.parser.Feature;
import com.alibaba.fastjson.serializer.SerializerFeature;
import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.nio.charset.StandardCharsets;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;

/**
 * Serves many stores from one JVM: one JSON request per line on stdin, one JSON answer per line on stdout.
 *
 * <p>A request is {"id", "command", "store", "settings", ...}; its answer is {"id", "answer"} or {"id", "failure"}.
 * Answers come in the order in which they are ready, because the real store sleeps whole seconds at start and stop.
 * The store is opened in place: pass a copy if the files must stay as they are.
 */
public final class Judge {
    private static final int STORES_AT_ONCE = 4;

    private final PrintStream answers = new PrintStream(new FileOutputStream(FileDescriptor.out), false, StandardCharsets.UTF_8);

    public static void main(String[] arguments) throws Exception {
        System.setOut(System.err);
        StoreLog.install();
        new Judge().serve();
        System.exit(0); // the store leaves threads behind
    }

    private void serve() throws Exception {
        ExecutorService pool = Executors.newFixedThreadPool(STORES_AT_ONCE);
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = requests.readLine(); line != null; line = requests.readLine()) {
            JSONObject request = JSON.parseObject(line, Feature.OrderedField);
            pool.submit(() -> reply(request));
        }
        pool.shutdownNow();
    }

    private void reply(JSONObject request) {
        Row reply = Row.of("id", request.get("id"));
        try {
            StoreLog.begin();
            reply.with("answer", perform(request));
        } catch (Throwable thrown) {
            StringWriter trace = new StringWriter();
            thrown.printStackTrace(new PrintWriter(trace));
            reply.with("failure", trace.toString()).with("log", StoreLog.troubles());
        }
        String text = JSON.toJSONString(reply, SerializerFeature.WriteMapNullValue,
            SerializerFeature.DisableCircularReferenceDetect);
        synchronized (answers) {
            answers.println(text);
            answers.flush();
        }
    }

    private static Row perform(JSONObject request) throws Exception {
        switch (request.getString("command")) {
            case "verify":
                return Verification.of(request);
            case "write":
                return Writing.of(request);
            case "offsets":
                return GroupOffsets.of(request);
            case "filter":
                return Filtering.of(request);
            case "ha_open":
            case "ha_put":
            case "ha_look":
            case "ha_close":
                return Replicating.of(request);
            default:
                throw new IllegalArgumentException("unknown command " + request.getString("command"));
        }
    }
}
