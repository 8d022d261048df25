"""A run's life: put together, resumed, recorded, judged, sampled, exported; alone, as coordinator or as worker."""
