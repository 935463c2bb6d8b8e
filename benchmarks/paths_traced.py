"""Traces the process that imports it, and those that it forks: workers, by ``preload``."""

from paths import trace

trace()
