"""Moving bytes: source reader, destination log writer, alignment, the copying of one mirror."""
