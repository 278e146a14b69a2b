package clients;

import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import java.util.Arrays;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.remoting.RPCHook;

/** Load for benches: threads that send one message after the other, and a consumer that takes all there are. */
class Load {
    private Load() {
    }

    /** Send for a while from each thread; how many were stored, in what time, and how long the middle one and the 99th of 100 took. */
    static JSONObject send(DefaultMQProducer producer, JSONObject told) throws Exception {
        int threads = told.getIntValue("threads");
        long until = System.nanoTime() + told.getLongValue("ms") * 1_000_000;
        byte[] body = new byte[told.getIntValue("size")];
        Arrays.fill(body, (byte) 'x');
        long[][] took = new long[threads][];
        AtomicLong failed = new AtomicLong();
        Thread[] running = new Thread[threads];
        long began = System.nanoTime();
        for (int number = 0; number < threads; number++) {
            int mine = number;
            running[number] = new Thread(() -> {
                long[] found = new long[1 << 20];
                int count = 0;
                long now = System.nanoTime();
                while (now < until && count < found.length) {
                    try {
                        if (producer.send(new Message(told.getString("topic"), "t", body)).getSendStatus() != SendStatus.SEND_OK) {
                            failed.incrementAndGet();
                        }
                    } catch (Exception error) {
                        failed.incrementAndGet();
                    }
                    long after = System.nanoTime();
                    found[count++] = after - now;
                    now = after;
                }
                took[mine] = Arrays.copyOf(found, count);
            });
            running[number].start();
        }
        for (Thread each : running) {
            each.join();
        }
        double seconds = (System.nanoTime() - began) / 1e9;
        long[] all = Arrays.stream(took).flatMapToLong(Arrays::stream).sorted().toArray();
        JSONObject answer = new JSONObject();
        answer.put("messages", all.length);
        answer.put("failed", failed.get());
        answer.put("seconds", seconds);
        answer.put("p50_us", all[all.length / 2] / 1e3);
        answer.put("p99_us", all[(int) (all.length * 0.99)] / 1e3);
        return answer;
    }

    /** Send numbered messages one after the other for a while, whatever happens meanwhile; the bodies that were stored. */
    static JSONArray stream(DefaultMQProducer producer, JSONObject told) throws Exception {
        JSONArray stored = new JSONArray();
        long until = System.nanoTime() + told.getLongValue("ms") * 1_000_000;
        for (int number = told.getIntValue("first"); System.nanoTime() < until; number++) {
            String body = String.format("%07d", number);
            try {
                if (producer.send(new Message(told.getString("topic"), body.getBytes())).getSendStatus() == SendStatus.SEND_OK) {
                    stored.add(body);
                }
            } catch (Exception error) {
                Thread.sleep(20);  // it may be stored all the same
            }
        }
        return stored;
    }

    /** Consume so many messages of a topic with a new group; how long it took from the first to the last. */
    static JSONObject drain(String address, RPCHook signs, JSONObject told) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(told.getString("group"), signs, new AllocateMessageQueueAveragely());
        consumer.setNamesrvAddr(address);
        consumer.setInstanceName(told.getString("group"));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(told.getString("topic"), "*");
        int count = told.getIntValue("count");
        AtomicLong first = new AtomicLong();
        AtomicLong got = new AtomicLong();
        CountDownLatch done = new CountDownLatch(1);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            first.compareAndSet(0, System.nanoTime());
            if (got.addAndGet(messages.size()) >= count) {
                done.countDown();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        boolean whole = done.await(100, TimeUnit.SECONDS);
        JSONObject answer = new JSONObject();
        answer.put("messages", got.get());
        answer.put("whole", whole);
        answer.put("seconds", (System.nanoTime() - first.get()) / 1e9);
        consumer.shutdown();
        return answer;
    }
}
