import java.nio.charset.StandardCharsets;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Puts messages into pyengine and consumes them with Apache RocketMQ's own client for Java.
 *
 * <p>Arguments: how many messages (3), where the gateway's name server listens (127.0.0.1:9876). README.md has the commands.
 */
public class Orders {
    private static final String TOPIC = "orders";  // it is made with the first message
    private static final String TAG = "paid";
    private static final int LIMIT_S = 60;

    public static void main(String[] arguments) {
        try {
            run(arguments);
        } catch (Exception error) {
            error.printStackTrace();
            System.exit(1);  // threads of the client would keep the program running
        }
    }

    private static void run(String[] arguments) throws Exception {
        int count = arguments.length > 0 ? Integer.parseInt(arguments[0]) : 3;
        String names = arguments.length > 1 ? arguments[1] : "127.0.0.1:9876";

        DefaultMQProducer producer = new DefaultMQProducer("shop");
        producer.setNamesrvAddr(names);
        producer.start();
        for (int number = 0; number < count; number++) {
            byte[] body = ("order " + number).getBytes(StandardCharsets.UTF_8);
            SendResult result = producer.send(new Message(TOPIC, TAG, body));
            System.out.println("put " + result.getSendStatus() + " " + number);
        }
        producer.shutdown();

        CountDownLatch left = new CountDownLatch(count);
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("billing");
        consumer.setNamesrvAddr(names);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(TOPIC, TAG);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                System.out.println("got " + new String(message.getBody(), StandardCharsets.UTF_8));
                left.countDown();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        boolean allCame = left.await(LIMIT_S, TimeUnit.SECONDS);
        consumer.shutdown();
        if (!allCame) {
            throw new IllegalStateException(left.getCount() + " of " + count + " messages did not come within " + LIMIT_S + " s");
        }
    }
}
