"""Trackers of services and programs that people use: W&B, MLflow, TensorBoard, SwanLab, trackio, OpenTelemetry."""
