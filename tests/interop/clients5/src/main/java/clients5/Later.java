package clients5;

import java.util.ArrayList;
import java.util.List;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/** Sends to a topic at once, in a batch and for later; prints what its lite pull consumer gets, and how late. */
public final class Later {
    private static final String TOPIC = "later5";
    private static final int AT_ONCE = 25;
    private static final int LATER = 3;
    private static final int DELAY_MS = 1500;
    private static final long DEADLINE_MS = 60_000;

    private Later() {
    }

    public static void main(String[] arguments) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("later5_senders");
        producer.setNamesrvAddr(arguments[0]);
        producer.start();
        for (int i = 0; i < 20; i++) {
            producer.send(message("now"));
        }
        List<Message> batch = new ArrayList<>();
        for (int i = 20; i < AT_ONCE; i++) {
            batch.add(message("now"));
        }
        producer.send(batch);
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer("later5_readers");
        consumer.setNamesrvAddr(arguments[0]);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(TOPIC, "*");
        consumer.start();
        List<MessageExt> found = new ArrayList<>();
        poll(consumer, found, AT_ONCE);
        Message inMilliseconds = message("later");
        inMilliseconds.setDelayTimeMs(DELAY_MS);
        Message inSeconds = message("later");
        inSeconds.setDelayTimeSec(2);
        Message atTime = message("later");
        atTime.setDeliverTimeMs(System.currentTimeMillis() + DELAY_MS);
        for (Message each : List.of(inMilliseconds, inSeconds, atTime)) {
            producer.send(each);
        }
        poll(consumer, found, AT_ONCE + LATER);
        long early = found.stream().filter(each -> new String(each.getBody()).equals("later"))
            .filter(each -> each.getStoreTimestamp() - each.getBornTimestamp() < DELAY_MS - 100).count();
        Message tooLate = message("never");
        tooLate.setDelayTimeSec(41 * 86_400);
        int refused = 0;
        try {
            producer.send(tooLate);
        } catch (MQBrokerException error) {
            refused = error.getResponseCode();
        }
        System.out.println("got " + found.size() + " early " + early + " refused " + refused);
        System.exit(0);
    }

    private static Message message(String body) {
        return new Message(TOPIC, "t", body.getBytes());
    }

    private static void poll(DefaultLitePullConsumer consumer, List<MessageExt> found, int wanted) {
        long until = System.currentTimeMillis() + DEADLINE_MS;
        while (found.size() < wanted && System.currentTimeMillis() < until) {
            found.addAll(consumer.poll(1000));
        }
    }
}
