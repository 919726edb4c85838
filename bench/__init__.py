"""Performance figures of this machine, some compared with a peer measured at the same time: `make bench`."""
