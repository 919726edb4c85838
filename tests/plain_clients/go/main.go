// Plain consumers of a topic with Pulsar's Go client, with the arguments and the output of ../PlainConsumer.java.
package main

import (
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"

	"github.com/apache/pulsar-client-go/pulsar"
)

var kinds = map[string]pulsar.SubscriptionType{
	"Exclusive": pulsar.Exclusive, "Shared": pulsar.Shared, "Failover": pulsar.Failover, "Key_Shared": pulsar.KeyShared,
}

var printing sync.Mutex

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func show(kind string, message pulsar.Message) {
	id, encoding := message.ID(), base64.StdEncoding
	place := fmt.Sprintf("%d:%d:%d", id.LedgerID(), id.EntryID(), id.BatchIdx())
	key, value := encoding.EncodeToString([]byte(message.Key())), encoding.EncodeToString(message.Payload())
	printing.Lock()
	defer printing.Unlock()
	fmt.Println(strings.Join([]string{kind, place, key, value}, "\t"))
}

func read(client pulsar.Client, topic string) {
	reader, err := client.CreateReader(pulsar.ReaderOptions{Topic: topic, StartMessageID: pulsar.EarliestMessageID()})
	check(err)
	for {
		message, err := reader.Next(context.Background())
		check(err)
		show("reader", message)
	}
}

func consume(client pulsar.Client, topic string, kind string) {
	consumer, err := client.Subscribe(pulsar.ConsumerOptions{
		Topic: topic, SubscriptionName: "go-" + kind, Type: kinds[kind],
		SubscriptionInitialPosition: pulsar.SubscriptionPositionEarliest,
	})
	check(err)
	for {
		message, err := consumer.Receive(context.Background())
		check(err)
		show(kind, message)
		check(consumer.Ack(message))
	}
}

func main() {
	client, err := pulsar.NewClient(pulsar.ClientOptions{URL: os.Args[1]})
	check(err)
	for _, kind := range os.Args[3:] {
		if kind == "reader" {
			go read(client, os.Args[2])
		} else {
			go consume(client, os.Args[2], kind)
		}
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	check(err)
}
