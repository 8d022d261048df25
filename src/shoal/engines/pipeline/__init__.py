"""Pipeline parallelism: stages of one model in several processes."""
