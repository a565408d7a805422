"""The transport `cuda_ipc`: a ring of buckets in an accelerator's memory that processes of one machine open."""
