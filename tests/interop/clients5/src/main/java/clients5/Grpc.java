package clients5;

import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.FilterExpressionType;
import org.apache.rocketmq.client.apis.consumer.PushConsumer;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;

/** Sends all types of messages by gRPC and consumes them; prints what came how often. Arguments: port, topic, ordered group, topic of transactions. */
public final class Grpc {
    private static final ClientServiceProvider PROVIDER = ClientServiceProvider.loadService();
    private static final int PLAIN = 100;
    private static final int ORDERED = 30;
    private static final int DEADLINE_S = 90;

    private Grpc() {
    }

    public static void main(String[] arguments) throws Exception {
        String topic = arguments[1];
        String halves = arguments.length > 3 ? arguments[3] : topic;
        ClientConfiguration settings = ClientConfiguration.newBuilder().setEndpoints("127.0.0.1:" + arguments[0]).enableSsl(false).build();
        Producer producer = PROVIDER.newProducerBuilder().setClientConfiguration(settings).setTopics(topic, halves)
            .setTransactionChecker(view -> text(view).equals("orphan") ? TransactionResolution.COMMIT : TransactionResolution.ROLLBACK)
            .build();
        BlockingQueue<String> pushed = new LinkedBlockingQueue<>();
        PushConsumer push = push(settings, "push_" + topic, List.of(topic, halves), "plain || late || tx", view -> {
            pushed.add(text(view) + " " + view.getDeliveryAttempt());
            return text(view).equals("7") && view.getDeliveryAttempt() < 2 ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
        });
        BlockingQueue<String> ordered = new LinkedBlockingQueue<>();
        PushConsumer fifo = push(settings, arguments[2], List.of(topic), "ordered", view -> {
            ordered.add(text(view));
            return ConsumeResult.SUCCESS;
        });
        for (int i = 0; i < PLAIN; i++) {
            producer.send(message(topic, "plain", String.valueOf(i)).build());
        }
        for (int i = 0; i < ORDERED; i++) {
            producer.send(message(topic, "ordered", String.valueOf(i)).setMessageGroup("group").build());
        }
        producer.send(message(topic, "late", "late").setDeliveryTimestamp(System.currentTimeMillis() + 2000).build());
        for (String body : List.of("committed", "rolled back", "orphan")) {
            Transaction transaction = producer.beginTransaction();
            producer.send(message(halves, "tx", body).build(), transaction);
            if (body.equals("committed")) {
                transaction.commit();
            } else if (body.equals("rolled back")) {
                transaction.rollback();
            }
        }
        Map<String, Integer> attempts = new TreeMap<>();
        for (String each : take(pushed, PLAIN + 1 + 3)) {
            attempts.merge(each.substring(each.lastIndexOf(' ') + 1), 1, Integer::sum);
        }
        System.out.println("pushed " + attempts + " ordered " + String.join(",", take(ordered, ORDERED)));
        System.out.println("simple " + simple(settings, topic));
        push.close();
        fifo.close();
        producer.close();
        System.exit(0);
    }

    private static MessageBuilder message(String topic, String tag, String body) {
        return PROVIDER.newMessageBuilder().setTopic(topic).setTag(tag).setKeys("key-" + body).addProperty("n", body).setBody(body.getBytes());
    }

    private static PushConsumer push(ClientConfiguration settings, String group, List<String> topics, String tags,
                                     org.apache.rocketmq.client.apis.consumer.MessageListener listener) throws Exception {
        Map<String, FilterExpression> subscriptions = new TreeMap<>();
        topics.forEach(topic -> subscriptions.put(topic, new FilterExpression(tags, FilterExpressionType.TAG)));
        return PROVIDER.newPushConsumerBuilder().setClientConfiguration(settings).setConsumerGroup(group)
            .setSubscriptionExpressions(subscriptions).setMessageListener(listener).build();
    }

    private static int simple(ClientConfiguration settings, String topic) throws Exception {
        SimpleConsumer consumer = PROVIDER.newSimpleConsumerBuilder().setClientConfiguration(settings).setConsumerGroup("simple_" + topic)
            .setAwaitDuration(Duration.ofSeconds(5))
            .setSubscriptionExpressions(Collections.singletonMap(topic, new FilterExpression("n > 49", FilterExpressionType.SQL92))).build();
        List<String> found = new ArrayList<>();
        long until = System.currentTimeMillis() + DEADLINE_S * 1000L;
        while (found.size() < PLAIN / 2 && System.currentTimeMillis() < until) {
            for (MessageView view : consumer.receive(16, Duration.ofSeconds(30))) {
                found.add(text(view));
                consumer.ack(view);
            }
        }
        consumer.close();
        return found.size();
    }

    private static List<String> take(BlockingQueue<String> coming, int count) throws InterruptedException {
        List<String> found = new ArrayList<>();
        while (found.size() < count) {
            String next = coming.poll(DEADLINE_S, TimeUnit.SECONDS);
            if (next == null) {
                break;
            }
            found.add(next);
        }
        return found;
    }

    private static String text(MessageView view) {
        byte[] bytes = new byte[view.getBody().remaining()];
        view.getBody().duplicate().get(bytes);
        return new String(bytes);
    }
}
