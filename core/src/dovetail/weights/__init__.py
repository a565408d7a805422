"""How one version of the weights reaches every rollout replica, and the check that it computes with them."""
