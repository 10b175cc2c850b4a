"""Kafka messages that the client library has no classes for, in the form of Kafka's message definitions."""
