"""The transport `shared_memory`: a ring of buckets that processes of one machine map."""
