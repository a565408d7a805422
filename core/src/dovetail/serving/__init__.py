"""What rollouts on serving engines share: requests, pauses, weights, servers and their protocol. Names no engine and imports none."""
