"""Benchmarks: measurements that the commands run and write as results."""
