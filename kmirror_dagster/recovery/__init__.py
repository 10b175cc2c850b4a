"""What a failover has cost, and the way back: loss manifest, quarantine, failback."""
