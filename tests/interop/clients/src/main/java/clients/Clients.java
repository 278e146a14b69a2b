package clients;

import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.client.QueryResult;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.exception.RequestTimeoutException;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.common.protocol.heartbeat.MessageModel;
import org.apache.rocketmq.remoting.RPCHook;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/** Real clients, told what to do by lines of JSON: each line is a command, each gets one line of JSON as its answer. */
public class Clients {
    private static final PrintStream ANSWERS = System.out;
    private static final Map<String, DefaultMQProducer> PRODUCERS = new HashMap<>();
    private static final Map<String, Consuming> CONSUMERS = new HashMap<>();
    private static final Map<String, DefaultLitePullConsumer> PULLERS = new HashMap<>();
    private static String address;
    private static RPCHook signs;  // null without an access key
    private static String namespace;  // of the clients that are made from now on
    private static int instances;
    private static volatile boolean decides = true;  // whether producers know the ends of their transactions when they are asked

    public static void main(String[] arguments) throws Exception {
        address = arguments[0];
        signs = arguments.length > 1 ? new AclClientRPCHook(new SessionCredentials(arguments[1], arguments[2])) : null;
        System.setOut(System.err);  // what the client prints itself
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        String line;
        while ((line = commands.readLine()) != null) {
            JSONObject answer = new JSONObject();
            try {
                answer.put("ok", run(JSON.parseObject(line)));
            } catch (Throwable error) {
                error.printStackTrace();
                answer.put("error", error.getCause() == null ? error.toString() : error + ": " + error.getCause());
            }
            ANSWERS.println(answer.toJSONString());
            ANSWERS.flush();
        }
        System.exit(0);
    }

    private static Object run(JSONObject told) throws Exception {
        switch (told.getString("do")) {
            case "namespace": namespace = told.getString("name"); return true;
            case "send": return send(told);
            case "transact": return transact(told);
            case "subscribe": return subscribe(told);
            case "take": return CONSUMERS.get(told.getString("name")).take(told.getIntValue("count"), told.getIntValue("timeout_s"));
            case "stop": CONSUMERS.remove(told.getString("name")).consumer.shutdown(); return true;
            case "open_puller": return openPuller(told);
            case "poll": return poll(PULLERS.get(told.getString("name")), told.getIntValue("count"), told.getIntValue("timeout_s"));
            case "seek_to_begin": return seekToBegin(PULLERS.get(told.getString("name")));
            case "commit": PULLERS.get(told.getString("name")).commitSync(); return true;
            case "stop_puller": PULLERS.remove(told.getString("name")).shutdown(); return true;
            case "header_form": return RemotingCommand.getSerializeTypeConfigInThisServer().name();
            case "request": return request(told);
            case "load": return Load.send(producer(told.getString("group")), told);
            case "stream": return Load.stream(producer(told.getString("group")), told);
            case "drain": return Load.drain(address, signs, told);
            case "decide": decides = told.getBooleanValue("yes"); return true;
            case "view": return row(producer("viewer").viewMessage(told.getString("topic"), told.getString("id")));
            case "query": return query(told);
            case "admin": return admin(told.getJSONArray("arguments"));
            default: throw new IllegalArgumentException("no command: " + told);
        }
    }

    private static synchronized DefaultMQProducer producer(String group) throws Exception {
        DefaultMQProducer found = PRODUCERS.get(group);
        if (found == null) {
            found = new DefaultMQProducer(group, signs, group.startsWith("traced"), null);
            start(found);
        }
        return found;
    }

    private static void start(DefaultMQProducer producer) throws Exception {
        producer.setNamesrvAddr(address);
        producer.setInstanceName("producer-" + ++instances);
        if (namespace != null) {
            producer.setNamespace(namespace);
        }
        producer.setSendMsgTimeout(10000);
        producer.start();
        PRODUCERS.put(producer.getProducerGroup(), producer);
    }

    private static List<Message> messages(JSONObject told) {
        List<Message> made = new ArrayList<>();
        for (Object body : told.getJSONArray("bodies")) {
            Message message = new Message(told.getString("topic"), told.getString("tags"), (String) body,
                    ((String) body).getBytes(StandardCharsets.UTF_8));
            if (told.containsKey("delay")) {
                message.setDelayTimeLevel(told.getIntValue("delay"));
            }
            if (told.containsKey("property")) {
                message.putUserProperty("color", told.getString("property"));
            }
            made.add(message);
        }
        return made;
    }

    private static Object send(JSONObject told) throws Exception {
        DefaultMQProducer producer = producer(told.getString("group"));
        List<Message> messages = messages(told);
        JSONArray answers = new JSONArray();
        switch (told.getString("how")) {
            case "sync":
                for (Message message : messages) {
                    try {
                        answers.add(row(producer.send(message)));
                    } catch (Exception error) {
                        answers.add(error.toString());
                        if (!told.getBooleanValue("go_on")) {
                            throw error;
                        }
                    }
                }
                break;
            case "ordered":
                for (Message message : messages) {
                    answers.add(row(producer.send(message, (queues, sent, key) -> queues.get((int) key % queues.size()),
                            told.getIntValue("queue"))));
                }
                break;
            case "async":
                CountDownLatch left = new CountDownLatch(messages.size());
                for (Message message : messages) {
                    producer.send(message, new SendCallback() {
                        @Override public void onSuccess(SendResult result) {
                            synchronized (answers) {
                                answers.add(row(result));
                            }
                            left.countDown();
                        }

                        @Override public void onException(Throwable error) {
                            synchronized (answers) {
                                answers.add(error.toString());
                            }
                            left.countDown();
                        }
                    });
                }
                left.await(60, TimeUnit.SECONDS);
                break;
            case "one-way":
                for (Message message : messages) {
                    producer.sendOneway(message);
                }
                break;
            case "batch":
                answers.add(row(producer.send(messages)));
                break;
            default:
                throw new IllegalArgumentException("no way to send: " + told);
        }
        return answers;
    }

    private static Object transact(JSONObject told) throws Exception {
        String group = told.getString("group");
        TransactionMQProducer producer = (TransactionMQProducer) PRODUCERS.get(group);
        if (producer == null) {
            producer = new TransactionMQProducer(group, signs);
            producer.setTransactionListener(new TransactionListener() {
                @Override public LocalTransactionState executeLocalTransaction(Message message, Object wanted) {
                    return LocalTransactionState.valueOf((String) wanted);
                }

                @Override public LocalTransactionState checkLocalTransaction(MessageExt message) {
                    return decides ? LocalTransactionState.COMMIT_MESSAGE : LocalTransactionState.UNKNOW;
                }
            });
            start(producer);
        }
        JSONArray answers = new JSONArray();
        for (Message message : messages(told)) {
            answers.add(row(producer.sendMessageInTransaction(message, told.getString("outcome"))));
        }
        return answers;
    }

    private static Object request(JSONObject told) throws Exception {
        JSONArray answers = new JSONArray();
        for (Message message : messages(told)) {
            try {
                answers.add(new String(producer(told.getString("group")).request(message, told.getIntValue("timeout_ms")).getBody(),
                        StandardCharsets.UTF_8));
            } catch (RequestTimeoutException error) {
                answers.add(null);
            }
        }
        return answers;
    }

    private static Object query(JSONObject told) throws Exception {
        QueryResult found = producer("viewer").queryMessage(told.getString("topic"), told.getString("key"), 32, 0, System.currentTimeMillis());
        JSONArray rows = new JSONArray();
        for (MessageExt message : found.getMessageList()) {
            rows.add(row(message));
        }
        return rows;
    }

    private static Object admin(JSONArray arguments) {
        java.io.ByteArrayOutputStream told = new java.io.ByteArrayOutputStream();
        PrintStream before = System.out;
        System.setOut(new PrintStream(told, true));
        try {
            System.setProperty("rocketmq.namesrv.addr", address);
            MQAdminStartup.main0(arguments.toArray(new String[0]), null);
        } finally {
            System.setOut(before);
        }
        return told.toString();
    }

    private static JSONObject row(SendResult result) {
        JSONObject row = new JSONObject();
        row.put("status", result.getSendStatus().name());
        row.put("id", result.getOffsetMsgId());
        row.put("unique", result.getMsgId());
        row.put("queue", result.getMessageQueue().getQueueId());
        row.put("offset", result.getQueueOffset());
        return row;
    }

    private static JSONObject row(MessageExt message) {
        JSONObject row = new JSONObject();
        row.put("body", new String(message.getBody(), StandardCharsets.UTF_8));
        row.put("queue", message.getQueueId());
        row.put("offset", message.getQueueOffset());
        row.put("times", message.getReconsumeTimes());
        row.put("tags", message.getTags());
        row.put("topic", message.getTopic());
        row.put("born", message.getBornHostString());
        return row;
    }

    private static Object subscribe(JSONObject told) throws Exception {
        CONSUMERS.put(told.getString("name"), new Consuming(told));
        return true;
    }

    /** A consumer that commits when it is told to; with `assigned` it takes all queues itself, else the group shares them out. */
    private static Object openPuller(JSONObject told) throws Exception {
        DefaultLitePullConsumer puller = new DefaultLitePullConsumer(told.getString("group"), signs);
        puller.setNamesrvAddr(address);
        puller.setInstanceName("puller-" + ++instances);
        puller.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        puller.setAutoCommit(false);
        if (told.getBooleanValue("assigned")) {
            puller.start();
            puller.assign(puller.fetchMessageQueues(told.getString("topic")));
        } else {
            puller.subscribe(told.getString("topic"), "*");
            puller.start();
        }
        PULLERS.put(told.getString("name"), puller);
        return true;
    }

    private static JSONArray poll(DefaultLitePullConsumer puller, int count, int timeoutS) {
        JSONArray rows = new JSONArray();
        long until = System.currentTimeMillis() + timeoutS * 1000L;
        while (rows.size() < count && System.currentTimeMillis() < until) {
            for (MessageExt message : puller.poll(100)) {
                rows.add(row(message));
            }
        }
        return rows;
    }

    private static int seekToBegin(DefaultLitePullConsumer puller) throws Exception {
        int queues = 0;
        for (MessageQueue queue : puller.assignment()) {
            puller.seekToBegin(queue);
            queues++;
        }
        return queues;
    }

    private static class Consuming {
        final DefaultMQPushConsumer consumer;
        final JSONArray got = new JSONArray();
        final int failures;

        Consuming(JSONObject told) throws Exception {
            failures = told.getIntValue("failures");
            consumer = new DefaultMQPushConsumer(told.getString("group"), signs, new AllocateMessageQueueAveragely());
            consumer.setNamesrvAddr(address);
            consumer.setInstanceName("consumer-" + ++instances);
            if (namespace != null) {
                consumer.setNamespace(namespace);
            }
            consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
            if (told.containsKey("most")) {
                consumer.setMaxReconsumeTimes(told.getIntValue("most"));
            }
            if (told.getBooleanValue("broadcast")) {
                consumer.setMessageModel(MessageModel.BROADCASTING);
            }
            if (told.containsKey("sql")) {
                consumer.subscribe(told.getString("topic"), org.apache.rocketmq.client.consumer.MessageSelector.bySql(told.getString("sql")));
            } else {
                consumer.subscribe(told.getString("topic"), told.getString("tags") == null ? "*" : told.getString("tags"));
            }
            if (told.getBooleanValue("ordered")) {
                consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                    add(messages);
                    return ConsumeOrderlyStatus.SUCCESS;
                });
            } else {
                consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                    add(messages);
                    if (told.containsKey("replies")) {
                        reply(messages);
                    }
                    if (messages.get(0).getReconsumeTimes() < failures) {
                        context.setDelayLevelWhenNextConsume(told.getIntValue("delay"));
                        return ConsumeConcurrentlyStatus.RECONSUME_LATER;
                    }
                    return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
                });
            }
            consumer.start();
        }

        static void reply(List<MessageExt> messages) {
            for (MessageExt message : messages) {
                try {
                    byte[] body = ("re: " + new String(message.getBody(), StandardCharsets.UTF_8)).getBytes(StandardCharsets.UTF_8);
                    producer("repliers").send(MessageUtil.createReplyMessage(message, body));
                } catch (Exception error) {
                    throw new RuntimeException(error);
                }
            }
        }

        synchronized void add(List<MessageExt> messages) {
            for (MessageExt message : messages) {
                got.add(row(message));
            }
            notifyAll();
        }

        synchronized JSONArray take(int count, int timeoutS) throws InterruptedException {
            long until = System.currentTimeMillis() + timeoutS * 1000L;
            while (got.size() < count && System.currentTimeMillis() < until) {
                wait(100);
            }
            JSONArray all = new JSONArray();
            all.addAll(got);
            return all;
        }
    }
}
