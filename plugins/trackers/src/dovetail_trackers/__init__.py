"""Trackers for W&B, MLflow, TensorBoard, SwanLab, trackio and OpenTelemetry, and alerts."""
