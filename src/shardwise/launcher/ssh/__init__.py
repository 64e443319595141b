"""Launching on other hosts over OpenSSH."""
