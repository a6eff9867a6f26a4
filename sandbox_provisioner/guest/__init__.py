"""What runs inside the sandbox: PID 1 and the frames it shares with the host. Standard library only."""
