"""What a caller holds: the remote model, and the choice of replicas, retries and pushes behind it."""
