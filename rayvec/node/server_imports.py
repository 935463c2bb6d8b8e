"""What a fork server imports before it forks workers."""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import shutil
import sys

import rayvec.node.worker_main  # noqa: F401  # what every worker needs
from rayvec.envs.owner_signals import leave_to_owner
from rayvec.node.processes import PRELOAD, import_modules, kill_with_parent

_OWNER_END_S = 1.0
"""How long after its files an owner that ends may still be a process."""
_path, _modules, _folder = json.loads(os.environ.pop(PRELOAD, '[[], [], ""]'))
_owner = os.pidfd_open(os.getppid())


@atexit.register
def _remove_folder() -> None:
    """Removes the folder of the sockets, if the owner has ended. Workers do not run this: they end by os._exit."""
    if select.select([_owner], [], [], _OWNER_END_S)[0]:
        shutil.rmtree(_folder, ignore_errors=True)


sys.path[:] = dict.fromkeys([*_path, *sys.path])
leave_to_owner()
kill_with_parent(True)  # also if an import never returns
import_modules(_modules)
kill_with_parent(False)  # the server ends with its owner, and not with the thread that started it
gc.freeze()  # workers share the pages of what is imported, which garbage collection would write
