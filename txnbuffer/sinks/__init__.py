"""Where change streams go: the loop that fills a sink from a topic, exactly once, and the sinks that there are."""
