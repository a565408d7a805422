"""Code shared by all transports between processes: an update is sent bucket by bucket through a ring of slots."""
