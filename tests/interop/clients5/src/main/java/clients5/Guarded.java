package clients5;

import java.time.Duration;
import java.util.Collections;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.StaticSessionCredentialsProvider;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;

/**
 * Sends a message and receives it; prints for each `ok` or the exception. Arguments: endpoints, whether by TLS, access key (or empty),
 * secret, topic, group.
 */
public final class Guarded {
    private static final ClientServiceProvider PROVIDER = ClientServiceProvider.loadService();
    private static final long DEADLINE_MS = 60_000;

    private Guarded() {
    }

    public static void main(String[] arguments) {
        var building = ClientConfiguration.newBuilder().setEndpoints(arguments[0]).enableSsl(Boolean.parseBoolean(arguments[1]))
            .setRequestTimeout(Duration.ofSeconds(10));
        if (!arguments[2].isEmpty()) {
            building.setCredentialProvider(new StaticSessionCredentialsProvider(arguments[2], arguments[3]));
        }
        ClientConfiguration settings = building.build();
        try (Producer producer = PROVIDER.newProducerBuilder().setClientConfiguration(settings).setMaxAttempts(1).build()) {
            producer.send(PROVIDER.newMessageBuilder().setTopic(arguments[4]).setBody("by Java".getBytes()).build());
            System.out.println("send ok");
        } catch (Throwable error) {
            System.out.println("send " + error);
        }
        try (SimpleConsumer consumer = PROVIDER.newSimpleConsumerBuilder().setClientConfiguration(settings).setConsumerGroup(arguments[5])
                .setAwaitDuration(Duration.ofSeconds(2))
                .setSubscriptionExpressions(Collections.singletonMap(arguments[4], FilterExpression.SUB_ALL)).build()) {
            receive(consumer);
            System.out.println("receive ok");
        } catch (Throwable error) {
            System.out.println("receive " + error);
        }
        System.exit(0);
    }

    private static void receive(SimpleConsumer consumer) throws Exception {
        long until = System.currentTimeMillis() + DEADLINE_MS;
        while (System.currentTimeMillis() < until) {
            for (MessageView view : consumer.receive(4, Duration.ofSeconds(30))) {
                consumer.ack(view);
                return;
            }
        }
        throw new IllegalStateException("nothing came");
    }
}
