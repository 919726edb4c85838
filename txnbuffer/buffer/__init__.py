"""The transactional state of one topic, pure: the buffer folded from its log, visibility and sequence numbers."""
