"""`shardwise data prepare`: text files to a corpus of token shards, in parallel, restartable; no torch."""
