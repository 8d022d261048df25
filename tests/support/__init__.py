"""What several folders of tests share: processes, small clusters, servers, and `eventually`."""
