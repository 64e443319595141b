"""Search for the best plan on a cluster, with the reasons for and against each family of plans."""
