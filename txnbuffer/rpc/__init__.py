"""What clients and services need to reach each other: method names, service discovery, and log identity."""
