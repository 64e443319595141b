"""Launch on remote hosts over OpenSSH."""
