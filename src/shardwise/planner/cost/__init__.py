"""What a plan costs on a cluster: memory, traffic and time."""
