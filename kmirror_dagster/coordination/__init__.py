"""Who does what: leadership, state, coordinator, node process, HTTP API and its client."""
