"""The transport `nccl`: buckets broadcast between separate accelerators."""
