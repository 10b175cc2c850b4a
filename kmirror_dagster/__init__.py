"""Mirror Kafka clusters, same record at the same offset, steered in Dagster."""

__version__ = "0.1.0"
