"""What proves a broker: the contract suite, faults on demand, and a simulated disk."""
