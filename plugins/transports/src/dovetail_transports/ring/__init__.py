"""How an update goes bucket by bucket through a ring of slots: what every transport between processes shares."""
