"""What a call does, drawn from real ranks."""
