"""`train` and `launch`: start the ranks of a Spec, supervise them, and return a Report."""
