"""What an agent tells of its node to those who watch: figures of devices, and the newest lines of its log."""
