// Puts messages into pyengine and consumes them with Apache RocketMQ's own client for Go.
//
//	pyengine start my-store --set gateway_enable=true
//	cd examples/clients/go && go run . -count 3
//
// With an access key, whose secret is in ROCKETMQ_SECRET_KEY, the client signs what it asks: -access-key shop-key.
// With TLS, which the client has since a commit after 2.1.2: go run -modfile tls.mod -tags tls . -count 3
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
	"github.com/apache/rocketmq-client-go/v2/rlog"
)

// What every producer and consumer of this program gets beside its own; tls.go adds to them.
var (
	producing []producer.Option
	consuming []consumer.Option
)

func main() {
	names := flag.String("namesrv", "127.0.0.1:9876", "where the gateway's name server listens")
	topic := flag.String("topic", "orders", "the topic; it is made with the first message")
	group := flag.String("group", "billing", "the consumer group")
	count := flag.Int("count", 3, "how many messages")
	limit := flag.Duration("limit", time.Minute, "the longest time to wait for them")
	key := flag.String("access-key", "", "the access key, where the gateway asks for one")
	flag.Parse()
	rlog.SetLogLevel("error")
	if *key != "" {
		account := primitive.Credentials{AccessKey: *key, SecretKey: os.Getenv("ROCKETMQ_SECRET_KEY")}
		producing = append(producing, producer.WithCredentials(account))
		consuming = append(consuming, consumer.WithCredentials(account))
	}

	sender, err := rocketmq.NewProducer(append(producing,
		producer.WithNameServer([]string{*names}), producer.WithGroupName("shop"), producer.WithRetry(3))...)
	check(err)
	check(sender.Start())
	for number := range *count {
		message := primitive.NewMessage(*topic, fmt.Appendf(nil, "order %d", number)).WithTag("paid")
		result, err := sender.SendSync(context.Background(), message)
		check(err)
		fmt.Println("put", result.Status == primitive.SendOK, number)
	}
	check(sender.Shutdown())

	got := make(chan string, *count)
	receiver, err := rocketmq.NewPushConsumer(append(consuming,
		consumer.WithNameServer([]string{*names}), consumer.WithGroupName(*group),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset))...)
	check(err)
	check(receiver.Subscribe(*topic, consumer.MessageSelector{Type: consumer.TAG, Expression: "paid"},
		func(_ context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
			for _, message := range messages {
				got <- string(message.Body)
			}
			return consumer.ConsumeSuccess, nil
		}))
	check(receiver.Start())
	deadline := time.After(*limit)
	for range *count {
		select {
		case body := <-got:
			fmt.Println("got", body)
		case <-deadline:
			log.Fatalf("not all of %d messages came within %s", *count, *limit)
		}
	}
	check(receiver.Shutdown())
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
