"""The stages that core brings: what a step of a policy-gradient algorithm is made of."""
