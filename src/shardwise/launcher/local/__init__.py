"""Ranks of one host: started by fork or as new interpreters, supervised and restarted."""
