package clients5;

import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Arguments: name servers, topic, messages, a broker without lite pulls. Sends, and takes all by two push consumers of a group, and
 * those of the other brokers by a lite pull consumer.
 */
public final class Spread {
    private static final long DEADLINE_MS = 60_000;

    private Spread() {
    }

    public static void main(String[] arguments) {
        try {
            spread(arguments);
        } catch (Throwable error) {
            error.printStackTrace();
            System.exit(1);
        }
        System.exit(0);
    }

    private static void spread(String[] arguments) throws Exception {
        String names = arguments[0];
        String topic = arguments[1];
        int count = Integer.parseInt(arguments[2]);
        DefaultMQProducer producer = new DefaultMQProducer("spread5_senders");
        producer.setNamesrvAddr(names);
        producer.setSendMsgTimeout(30_000);
        producer.start();
        Map<String, Integer> sent = new TreeMap<>();
        for (int i = 0; i < count; i++) {
            sent.merge(producer.send(new Message(topic, "t", String.valueOf(i).getBytes())).getMessageQueue().getBrokerName(), 1, Integer::sum);
        }
        System.out.println("sent " + sent);
        Set<String> pushed = ConcurrentHashMap.newKeySet();
        Map<String, Integer> shares = new ConcurrentHashMap<>();
        List<DefaultMQPushConsumer> consumers = List.of(consumer(names, topic, "a", pushed, shares), consumer(names, topic, "b", pushed, shares));
        long until = System.currentTimeMillis() + DEADLINE_MS;
        while (pushed.size() < count && System.currentTimeMillis() < until) {
            Thread.sleep(50);
        }
        System.out.println("pushed " + pushed.size() + " to " + shares.size());
        DefaultLitePullConsumer puller = new DefaultLitePullConsumer("spread5_pullers");
        puller.setNamesrvAddr(names);
        puller.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        puller.subscribe(topic, "*");
        puller.start();
        Set<String> pulled = new HashSet<>();
        int wanted = count - sent.getOrDefault(arguments[3], 0);
        until = System.currentTimeMillis() + DEADLINE_MS;
        while (pulled.size() < wanted && System.currentTimeMillis() < until) {
            for (MessageExt message : puller.poll(500)) {
                pulled.add(new String(message.getBody()));
            }
        }
        System.out.println("pulled " + pulled.size());
        consumers.forEach(DefaultMQPushConsumer::shutdown);
        puller.shutdown();
        producer.shutdown();
    }

    private static DefaultMQPushConsumer consumer(String names, String topic, String name, Set<String> got, Map<String, Integer> shares)
            throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("spread5_readers");
        consumer.setNamesrvAddr(names);
        consumer.setInstanceName(name);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                got.add(new String(message.getBody()));
                shares.merge(name, 1, Integer::sum);
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        return consumer;
    }
}
