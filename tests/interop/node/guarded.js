// Sends a message and receives it; prints for each `ok` or the error. Arguments: endpoints, whether by TLS, access key (or empty), secret,
// topic, group.
const { Producer, SimpleConsumer } = require('rocketmq-client-nodejs');

const [endpoints, isByTls, accessKey, accessSecret, topic, consumerGroup] = process.argv.slice(2);
const settings = { endpoints, namespace: '', sslEnabled: isByTls === 'true', requestTimeout: 10000, maxAttempts: 1,
  sessionCredentials: accessKey ? { accessKey, accessSecret } : undefined };
const deadline = Date.now() + 60000;

async function send() {
  const producer = new Producer({ ...settings });
  await producer.startup();
  await producer.send({ topic, body: Buffer.from('by Node') });
}

async function receive() {
  const consumer = new SimpleConsumer({ ...settings, consumerGroup, awaitDuration: 2000, subscriptions: new Map([[topic, '*']]) });
  await consumer.startup();
  while (Date.now() < deadline) {
    for (const view of await consumer.receive(4, 30000)) {
      await consumer.ack(view);
      return;
    }
  }
  throw new Error('nothing came');
}

async function main() {
  for (const work of [send, receive]) {
    console.log(await work().then(() => `${work.name} ok`, error => `${work.name} ${error}`));
  }
  process.exit(0);
}

main();
