"""`train` and `launch` as functions: a Spec becomes ranks that are started, observed and explained."""
