"""verl: its commands, scripts and configs."""
