"""The only room that speaks Kafka: clients from settings, admin calls, wire protocol, record batches."""
