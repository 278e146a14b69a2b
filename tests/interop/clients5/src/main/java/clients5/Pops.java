package clients5;

import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/** Sends, and consumes with two push consumers that pop; each eighth message fails the first time. Prints what came how often. */
public final class Pops {
    private static final String TOPIC = "pops5";
    private static final int MESSAGES = 80;
    private static final long DEADLINE_MS = 90_000;

    private Pops() {
    }

    public static void main(String[] arguments) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("pops5_senders");
        producer.setNamesrvAddr(arguments[0]);
        producer.start();
        Map<String, Integer> done = new ConcurrentHashMap<>();
        Map<Integer, Integer> times = new ConcurrentHashMap<>();
        MessageListenerConcurrently listener = (messages, context) -> {
            MessageExt message = messages.get(0);
            String body = new String(message.getBody());
            if (!message.getTopic().equals(TOPIC)) {
                System.out.println("a message of " + message.getTopic());
            }
            if (Integer.parseInt(body) % 8 == 0 && message.getReconsumeTimes() == 0) {
                return ConsumeConcurrentlyStatus.RECONSUME_LATER;
            }
            done.merge(body, 1, Integer::sum);
            times.merge(message.getReconsumeTimes(), 1, Integer::sum);
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        };
        List<DefaultMQPushConsumer> consumers = List.of(consumer(arguments[0], "a", listener), consumer(arguments[0], "b", listener));
        for (int i = 0; i < MESSAGES; i++) {
            producer.send(new Message(TOPIC, "t", String.valueOf(i).getBytes()));
        }
        long until = System.currentTimeMillis() + DEADLINE_MS;
        while (done.size() < MESSAGES && System.currentTimeMillis() < until) {
            Thread.sleep(100);
        }
        Thread.sleep(2000); // acknowledgements are sent by another thread
        for (DefaultMQPushConsumer consumer : consumers) {
            consumer.shutdown();
        }
        long twice = done.values().stream().filter(each -> each > 1).count();
        System.out.println("got " + done.size() + " twice " + twice + " times " + new TreeMap<>(times));
        System.exit(0);
    }

    private static DefaultMQPushConsumer consumer(String names, String instance, MessageListenerConcurrently listener) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("pops5_readers");
        consumer.setNamesrvAddr(names);
        consumer.setInstanceName(instance);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setClientRebalance(false);
        consumer.subscribe(TOPIC, "*");
        consumer.registerMessageListener(listener);
        consumer.start();
        return consumer;
    }
}
