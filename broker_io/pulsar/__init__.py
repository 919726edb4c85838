"""Topics of a Pulsar cluster behind the broker port; needs the packages of the extra `pulsar`."""
