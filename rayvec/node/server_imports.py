"""What a fork server imports before it forks workers."""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import sys

import rayvec.node.serve  # noqa: F401  # what every worker needs
from rayvec.envs.owner_signals import leave_to_owner
from rayvec.node.preloaded import import_modules
from rayvec.node.processes import PRELOAD, answer_refused_forks, kill_with_parent, remove_folder_of

_path, _modules, _owner, _folder = json.loads(os.environ.pop(PRELOAD, '[[], [], 0, ""]'))
atexit.register(remove_folder_of, _owner, _folder)  # workers do not run this: they end by os._exit
sys.path[:] = dict.fromkeys([*_path, *sys.path])
leave_to_owner(signal.SIGTERM)
kill_with_parent(True)  # also if an import never returns
import_modules(_modules)
kill_with_parent(False)  # the server ends with its owner, and not with the thread that started it
answer_refused_forks()
gc.freeze()  # workers share the pages of what is imported, which garbage collection would write
