"""The environment servers that the settings of a run ask for."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from rayvec.config.references import is_unnamed
from rayvec.errors import counted, require
from rayvec.servers.env_servers import EnvServers

__all__ = ["served"]


@contextlib.contextmanager
def served(config: Any, env: Any, *, begun: bool = False) -> Iterator[Any]:
    """Yields `env`, or what makes the environments of the servers that the settings of a run ask for.

    Raises:
        ConfigError: There is another environment too.
    """
    settings = getattr(config, "env_servers", None)
    if not settings:
        yield env
        return
    has_id = not is_unnamed(config.env_id) and (begun or config.env_id != type(config).env_id)
    require(
        env is None and not has_id and config.native is None and not config.env_kwargs,
        "env_servers was passed to a run that has env, env_id, native or env_kwargs too. Servers take the place of all "
        "of them. Leave these out, or pass env_servers={}.",
    )
    wait_s = 0.9 * config.start_timeout_s  # its error says more than that of a worker which takes too long
    with EnvServers(config.num_envs, start_timeout_s=wait_s, **settings) as servers:
        if servers.port:
            waited = counted(config.num_envs, "environment server")
            print(f"rayvec: waiting for {waited} at port {servers.port}", file=sys.stderr)
        yield list(servers)
