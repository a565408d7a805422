"""What a role minimises: the objectives of policies, value functions and reward models."""
