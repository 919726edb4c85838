"""The shell of a pair: the node that drives a member, its store, its lock, the link to its peer, and its broker."""
