"""What the stages, objectives and losses compute with: masked statistics, KL, loss aggregation, rollout corrections."""
