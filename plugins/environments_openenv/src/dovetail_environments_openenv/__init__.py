"""The environment `openenv`: environments of OpenEnv."""
