"""Change streams in the service: a mutation manager for each topic that is streamed, backfills, connections."""
