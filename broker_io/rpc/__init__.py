"""What the protocols between processes share: the channel, and messages as bytes; and the protocol of the log."""
