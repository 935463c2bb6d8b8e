"""What a fork server imports before it forks workers."""

from __future__ import annotations

import gc
import json
import os
import sys

import rayvec.node.serve  # noqa: F401  # what every worker needs
from rayvec.node.preloaded import import_modules
from rayvec.node.processes import PRELOAD

_path, _modules = json.loads(os.environ.pop(PRELOAD, "[[], []]"))
sys.path[:] = dict.fromkeys([*_path, *sys.path])
import_modules(_modules)
gc.freeze()  # workers share the pages of what is imported, which garbage collection would write
