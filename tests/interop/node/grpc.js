// Sends all types of messages by gRPC and consumes them; prints as JSON what came. Arguments: port, topic, ordered group.
const { Producer, PushConsumer, SimpleConsumer, ConsumeResult, FilterExpression } = require('rocketmq-client-nodejs');
const { FilterType, TransactionResolution } = require('rocketmq-client-nodejs/proto/apache/rocketmq/v2/definition_pb');

const [port, topic, orderedGroup, deadlineSeconds] = process.argv.slice(2);
const settings = { endpoints: `127.0.0.1:${port}`, namespace: '' };
const deadline = Date.now() + Number(deadlineSeconds) * 1000;

const message = (tag, body, more = {}) => ({
  topic, tag, keys: ['k1', 'k2'], properties: new Map([['n', body]]), body: Buffer.from(body), ...more,
});

async function producer() {
  const checker = { check: async view => (view.body.toString() === 'orphan' ? TransactionResolution.COMMIT : TransactionResolution.ROLLBACK) };
  const made = new Producer({ ...settings, topics: [topic], checker });
  await made.startup();
  return made;
}

async function pushed(group, expression, consume) {
  const got = [];
  const made = new PushConsumer({ ...settings, consumerGroup: group, subscriptions: new Map([[topic, expression]]),
    messageListener: { consume: async view => {
      got.push([view.body.toString(), view.deliveryAttempt]);
      return consume(got, view) ? ConsumeResult.SUCCESS : ConsumeResult.FAILURE;
    } } });
  await made.startup();
  return [made, got];
}

async function until(isSo) {
  while (!isSo() && Date.now() < deadline) {
    await new Promise(done => setTimeout(done, 50));
  }
}

async function simple() {
  const consumer = new SimpleConsumer({ ...settings, consumerGroup: `simple_${topic}`, awaitDuration: 3000,
    subscriptions: new Map([[topic, new FilterExpression('n >= 50 AND n < 60', FilterType.SQL)]]) });
  await consumer.startup();
  const found = [];
  let isLate = false;
  while (found.length < 10 && Date.now() < deadline) {
    for (const view of await consumer.receive(4, 30000)) {
      if (view.body.toString() === '55' && !isLate) {
        isLate = true;
        await consumer.changeInvisibleDuration(view, 1000);
        continue;
      }
      found.push([view.body.toString(), view.deliveryAttempt, [...view.keys].sort(), view.tag, view.properties.get('n')]);
      await consumer.ack(view);
    }
  }
  await consumer.shutdown();
  return found;
}

async function main() {
  const sender = await producer();
  const times = {};
  const twice = (got, view) => !['3', '7'].includes(view.body.toString()) || (times[view.body] = (times[view.body] || 0) + 1) > 1;
  const [push, plain] = await pushed(`push_${topic}`, 'plain||late||tx', (got, view) => view.body.toString() !== '7' || view.deliveryAttempt > 1);
  const [fifo, ordered] = await pushed(orderedGroup, 'ordered', twice);
  const sent = [];
  for (let at = 0; at < 100; at++) {
    sent.push((await sender.send(message('plain', String(at)))).messageId);
  }
  for (let at = 0; at < 10; at++) {
    await sender.send(message('ordered', String(at), { messageGroup: 'group' }));
  }
  const due = new Date(Date.now() + 3000);
  await sender.send(message('late', 'late', { deliveryTimestamp: due }));
  await sender.recallMessage(topic, (await sender.send(message('late', 'recalled', { deliveryTimestamp: due }))).recallHandle);
  for (const body of ['committed', 'rolled back', 'orphan', 'lost']) {
    const transaction = sender.beginTransaction();
    await sender.send(message('tx', body), transaction);
    if (body === 'committed') {
      await transaction.commit();
    } else if (body === 'rolled back') {
      await transaction.rollback();
    }
  }
  await until(() => plain.length >= 104 && ordered.length >= 12);
  const found = await simple();
  await Promise.all([push.shutdown(), fifo.shutdown()]);
  await sender.shutdown();
  console.log(JSON.stringify({ sent: new Set(sent).size, plain, ordered: ordered.map(([body]) => body), found }));
  process.exit(0);
}

main().catch(error => {
  console.log(error.stack);
  process.exit(1);
});
