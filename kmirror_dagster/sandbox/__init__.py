"""Two real Apache Kafka clusters on this machine, from packages alone."""
