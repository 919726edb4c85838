import io.grpc.Channel;
import io.grpc.ClientInterceptors;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.stub.MetadataUtils;
import io.grpc.stub.StreamObserver;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import txnbuffer.v1.SessionGrpc;
import txnbuffer.v1.SessionOuterClass.Answer;
import txnbuffer.v1.SessionOuterClass.Begin;
import txnbuffer.v1.SessionOuterClass.ClientFrame;
import txnbuffer.v1.SessionOuterClass.Commit;
import txnbuffer.v1.SessionOuterClass.Hello;
import txnbuffer.v1.SessionOuterClass.LeaseRequest;
import txnbuffer.v1.SessionOuterClass.NamedRequest;
import txnbuffer.v1.SessionOuterClass.Send;
import txnbuffer.v1.SessionOuterClass.ServerFrame;
import txnbuffer.v1.StreamsGrpc;
import txnbuffer.v1.StreamsOuterClass.StreamClientFrame;
import txnbuffer.v1.StreamsOuterClass.StreamClientMessage;
import txnbuffer.v1.StreamsOuterClass.StreamGrant;
import txnbuffer.v1.StreamsOuterClass.StreamHello;
import txnbuffer.v1.StreamsOuterClass.StreamRequest;
import txnbuffer.v1.StreamsOuterClass.StreamServerFrame;
import txnbuffer.v1.StreamsOuterClass.StreamServerMessage;

/** Commits a transaction through a service, and reads the topic back: `Client HOST:PORT TOPIC KEY=VALUE...`. */
public final class Client {
  private static final String VERSION = "3";
  private static final int FROM_OLDEST = 2, TO_NOW = 4;

  public static void main(String[] arguments) throws Exception {
    ManagedChannel connection = ManagedChannelBuilder.forTarget(arguments[0])
        .usePlaintext()
        .maxInboundMessageSize(Integer.MAX_VALUE)
        .build();
    Metadata metadata = new Metadata();
    metadata.put(Metadata.Key.of("txnbuffer-version", Metadata.ASCII_STRING_MARSHALLER), VERSION);
    Channel channel = ClientInterceptors.intercept(connection, MetadataUtils.newAttachHeadersInterceptor(metadata));
    try {
      List<String> records = List.of(arguments).subList(2, arguments.length);
      System.out.println("committed " + commit(channel, arguments[1], records));
      read(channel, arguments[1]).forEach(System.out::println);
    } finally {
      connection.shutdownNow();
    }
  }

  /** Writes the records in one transaction; its id. */
  static String commit(Channel channel, String topic, List<String> records) throws Exception {
    Answers<ServerFrame> answers = new Answers<>();
    StreamObserver<ClientFrame> session = SessionGrpc.newStub(channel).talk(answers);
    session.onNext(ClientFrame.newBuilder().setHello(Hello.getDefaultInstance()).build());
    ServerFrame frame = answers.next();
    long shard = frame.getWelcome().getShard();

    session.onNext(ClientFrame.newBuilder()
        .addRegisters(NamedRequest.newBuilder().setRequest(1).setName(topic))
        .addLeases(LeaseRequest.newBuilder().setRequest(2).setSize(1))
        .build());
    answer(answers, 1);
    long id = answer(answers, 2).getLeased().getFirst();
    String txn = shard + ":" + id;

    List<String> keys = new ArrayList<>(), values = new ArrayList<>();
    for (String record : records) {
      keys.add(record.substring(0, record.indexOf('=')));
      values.add(record.substring(record.indexOf('=') + 1));
    }
    session.onNext(ClientFrame.newBuilder()
        .addBegins(Begin.newBuilder().setRequest(3).setMost(shard).setLeast(id))
        .addSends(Send.newBuilder().setTopic(topic))
        .addBlocks(Block.of(keys, values, txn, 1))
        .addCommits(Commit.newBuilder().setRequest(4).setMost(shard).setLeast(id)
            .addTopics(topic).addRecords(records.size()).setWaitVisible(true))
        .build());
    ServerFrame outcome = answers.next();
    while (outcome.getCommittedCount() == 0) {
      check(outcome);
      outcome = answers.next();
    }
    session.onNext(ClientFrame.newBuilder().setBye(true).build());
    session.onCompleted();
    return txn;
  }

  private static final List<Answer> received = new ArrayList<>();

  /** Waits for the answer to a request, and checks all that the service says before it. */
  static Answer answer(Answers<ServerFrame> answers, long request) throws Exception {
    while (true) {
      for (Answer one : received) {
        if (one.getRequest() == request) return one;
      }
      ServerFrame frame = answers.next();
      check(frame);
      received.addAll(frame.getAnswersList());
    }
  }

  /** Throws what failed according to a frame. */
  static void check(ServerFrame frame) {
    if (frame.hasGoodbye()) throw new IllegalStateException(frame.getGoodbye().getMessage());
    if (frame.getFailuresCount() > 0) throw new IllegalStateException(frame.getFailures(0).getError().getMessage());
    if (frame.getAbortedCount() > 0) throw new IllegalStateException("the transaction was aborted");
    for (Answer one : frame.getAnswersList()) {
      if (one.hasError()) throw new IllegalStateException(one.getError().getMessage());
    }
  }

  /** The committed records of a topic, as a change stream has them. */
  static List<String> read(Channel channel, String topic) throws Exception {
    Answers<StreamServerFrame> answers = new Answers<>();
    StreamObserver<StreamClientFrame> stream = StreamsGrpc.newStub(channel).stream(answers);
    stream.onNext(StreamClientFrame.newBuilder()
        .addMessages(StreamClientMessage.newBuilder().setHello(StreamHello.newBuilder().setNoopInterval(20)))
        .addMessages(StreamClientMessage.newBuilder().setRequest(StreamRequest.newBuilder()
            .setStream(1).setTopic(topic).setEnd(Long.MAX_VALUE).setFlags(FROM_OLDEST | TO_NOW)))
        .addMessages(StreamClientMessage.newBuilder().setGrant(StreamGrant.newBuilder()
            .setStream(1).setItems(10_000).setBytes(10_000_000)))
        .build());
    List<String> records = new ArrayList<>();
    while (true) {
      StreamServerFrame frame = answers.next();
      frame.getBlocksList().forEach(block -> records.addAll(Block.read(block)));
      for (StreamServerMessage message : frame.getMessagesList()) {
        switch (message.getMessageCase()) {
          case REFUSED -> throw new IllegalStateException(message.getRefused().getError().getMessage());
          case GOODBYE -> throw new IllegalStateException(message.getGoodbye().getMessage());
          case STREAM_END -> {
            stream.onCompleted();
            return records;
          }
          default -> { } // snapshots, which a client that applies changes must heed
        }
      }
    }
  }

  /** The messages of a call, for a thread that waits for them. */
  static final class Answers<T> implements StreamObserver<T> {
    private final BlockingQueue<Object> received = new LinkedBlockingQueue<>();

    @SuppressWarnings("unchecked")
    T next() throws Exception {
      Object found = received.poll(60, TimeUnit.SECONDS);
      if (found == null) throw new IllegalStateException("the service does not answer");
      if (found instanceof Throwable error) throw new IllegalStateException("the call has ended", error);
      return (T) found;
    }

    @Override public void onNext(T message) {
      received.add(message);
    }

    @Override public void onError(Throwable error) {
      received.add(error);
    }

    @Override public void onCompleted() {
      received.add(new IllegalStateException("the service ended the call"));
    }
  }
}
