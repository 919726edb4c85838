// Uses features of Pulsar's Go client, with the arguments and the output of ../../PlainFeatures.java.
package main

import (
	"context"
	"fmt"
	"os"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
)

const quiet = 500 * time.Millisecond // without a message after which none is expected

var background = context.Background()

func must[T any](value T, err error) T {
	check(err)
	return value
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func show(feature string, value any) {
	fmt.Printf("%s\t%v\n", feature, value)
}

type features struct {
	client pulsar.Client
	topic  string
	count  int
}

func rest(reader pulsar.Reader) []pulsar.Message {
	var found []pulsar.Message
	for reader.HasNext() {
		found = append(found, must(reader.Next(background)))
	}
	return found
}

func showAll(feature string, messages []pulsar.Message) {
	for _, message := range messages {
		show(feature, string(message.Payload()))
	}
}

func (f features) reads(at time.Time) {
	options := pulsar.ReaderOptions{Topic: f.topic, StartMessageID: pulsar.EarliestMessageID()}
	reader := must(f.client.CreateReader(options))
	defer reader.Close()
	all := rest(reader)
	showAll("read", all)
	last, found := must(reader.GetLastMessageID()), all[len(all)-1].ID()
	show("last", last.LedgerID() == found.LedgerID() && last.EntryID() == found.EntryID() &&
		last.BatchIdx() == found.BatchIdx())
	for _, message := range all {
		show("index", *message.Index())
	}
	check(reader.SeekByTime(at))
	showAll("seek-time", rest(reader))
	check(reader.Seek(all[2].ID()))
	showAll("seek-id", rest(reader))
	options.StartMessageID = pulsar.LatestMessageID() // this client does not seek to it
	latest := must(f.client.CreateReader(options))
	defer latest.Close()
	show("latest", len(rest(latest)))
}

// The table view of this client requires a schema.
func (f features) table() {
	reader := must(f.client.CreateReader(pulsar.ReaderOptions{
		Topic: f.topic, StartMessageID: pulsar.EarliestMessageID(), ReadCompacted: true,
	}))
	defer reader.Close()
	latest := map[string]string{}
	for _, message := range rest(reader) {
		latest[message.Key()] = string(message.Payload())
	}
	for key, value := range latest {
		show("table", key+"="+value)
	}
}

func (f features) consumer(name string, change func(*pulsar.ConsumerOptions)) pulsar.Consumer {
	options := pulsar.ConsumerOptions{
		Topic: f.topic, SubscriptionName: "go-" + name, Type: pulsar.Shared, EnableBatchIndexAcknowledgment: true,
		SubscriptionInitialPosition: pulsar.SubscriptionPositionEarliest, NackRedeliveryDelay: 100 * time.Millisecond,
	}
	change(&options)
	return must(f.client.Subscribe(options))
}

func unchanged(*pulsar.ConsumerOptions) {}

func soon(consumer pulsar.Consumer) (pulsar.Message, error) {
	limited, cancel := context.WithTimeout(background, quiet)
	defer cancel()
	return consumer.Receive(limited)
}

func (f features) acknowledgesSome() {
	consumer := f.consumer("some", unchanged)
	for i := range f.count {
		message := must(consumer.Receive(background))
		if i%2 == 0 {
			check(consumer.Ack(message))
		}
	}
	consumer.Close()
	consumer = f.consumer("some", unchanged)
	defer consumer.Close()
	for message, err := soon(consumer); err == nil; message, err = soon(consumer) {
		show("unacknowledged", string(message.Payload()))
		check(consumer.Ack(message))
	}
}

func (f features) refusesSome() {
	consumer := f.consumer("refused", unchanged)
	defer consumer.Close()
	for i := range f.count {
		message := must(consumer.Receive(background))
		if i%2 == 0 {
			check(consumer.Ack(message))
		} else {
			consumer.Nack(message)
		}
	}
	for range f.count / 2 {
		message := must(consumer.Receive(background))
		show("refused", string(message.Payload()))
		check(consumer.Ack(message))
	}
	_, err := soon(consumer)
	show("refused-more", err == nil)
}

// The first message, start, goes through the retry topic to the dead letters.
func (f features) sendsDeadLetters() {
	name := f.topic + "-go-dead"
	consumer := f.consumer("dead", func(options *pulsar.ConsumerOptions) {
		options.RetryEnable = true
		options.DLQ = &pulsar.DLQPolicy{
			MaxDeliveries: 1, DeadLetterTopic: name + "-DLQ", RetryLetterTopic: name + "-RETRY",
		}
	})
	defer consumer.Close()
	dead := must(f.client.CreateReader(pulsar.ReaderOptions{
		Topic: name + "-DLQ", StartMessageID: pulsar.LatestMessageID(),
	}))
	defer dead.Close()
	for range f.count + 1 {
		message := must(consumer.Receive(background))
		if string(message.Payload()) == "start" {
			consumer.ReconsumeLater(message, 10*time.Millisecond)
		} else {
			check(consumer.Ack(message))
		}
	}
	message := must(dead.Next(background))
	show("dead", string(message.Payload()))
	var names []string
	for name := range message.Properties() {
		if strings.HasPrefix(name, "tb.") {
			names = append(names, name)
		}
	}
	sort.Strings(names)
	for _, name := range names {
		show("dead-property", name)
	}
}

func main() {
	client := must(pulsar.NewClient(pulsar.ClientOptions{URL: os.Args[1]}))
	milliseconds := must(strconv.ParseInt(os.Args[3], 10, 64))
	f := features{client, os.Args[2], must(strconv.Atoi(os.Args[4]))}
	f.reads(time.UnixMilli(milliseconds))
	f.table()
	f.acknowledgesSome()
	f.refusesSome()
	f.sendsDeadLetters()
}
