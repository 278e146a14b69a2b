//go:build tls

package main

import (
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

// The client asks for TLS, and accepts any certificate.
func init() {
	producing = append(producing, producer.WithTls(true))
	consuming = append(consuming, consumer.WithTls(true))
}
