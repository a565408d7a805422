"""The objectives of policies, value functions and reward models."""
