"""What `ddpkit doctor` asks of this machine."""
