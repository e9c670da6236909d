"""What DDP's buckets do, measured: `CommProfiler`."""
