// Puts messages into pyengine and consumes them with Apache RocketMQ's own client for Go.
//
//	pyengine start my-store --set gateway_enable=true
//	cd examples/clients/go && go run . -count 3
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"time"

	"github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
	"github.com/apache/rocketmq-client-go/v2/rlog"
)

func main() {
	names := flag.String("namesrv", "127.0.0.1:9876", "where the gateway's name server listens")
	topic := flag.String("topic", "orders", "the topic; it is made with the first message")
	group := flag.String("group", "billing", "the consumer group")
	count := flag.Int("count", 3, "how many messages")
	limit := flag.Duration("limit", time.Minute, "the longest time to wait for them")
	flag.Parse()
	rlog.SetLogLevel("error")

	sender, err := rocketmq.NewProducer(producer.WithNameServer([]string{*names}), producer.WithGroupName("shop"), producer.WithRetry(3))
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
	receiver, err := rocketmq.NewPushConsumer(
		consumer.WithNameServer([]string{*names}), consumer.WithGroupName(*group),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset))
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
