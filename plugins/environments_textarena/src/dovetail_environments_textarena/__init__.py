"""The environment `textarena`: games of TextArena."""
