"""The network of a cluster, examined from one machine."""
